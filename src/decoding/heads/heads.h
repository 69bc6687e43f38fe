// A token's queries, keys and values between their projections and attention: norms by head, rotation and the append.
#pragma once

#include "decoding/append/append.h"
#include "decoding/graph/plan.h"
#include "decoding/heads/params.h"
#include "runtime/node.h"

#include <optional>
#include <string>

namespace mlx_cuda {

// Heads from a projection [batch, heads, dim], and the operations on each.
struct Heads {
  mx::array rows;
  mx::array out;
  int count;
  MaybeArray norm{};
  float eps = 0;
};

// The same rotation of queries and keys.
struct Rotation {
  int dims;
  bool traditional;
  float base;
  float scale;
  mx::array offset;
  MaybeArray freqs{};
};

struct HeadsCall {
  Heads queries;
  Heads keys;
  mx::array values;
  Rotation rotation;
  Arrays caches;          // of keys and values, [pages, heads, capacity, dim], or their parts (append.h), and
  Arrays appended;        // with the token
  mx::array where;        // int32 [2, batch]: pages and rows
  const Item* attention;  // that reads both
  std::optional<QuantizedAppendForm> form{};

  Arrays inputs() const;
  std::string name() const;
};

// Matches the preparation of an append's keys and values for attention, and nothing more.
std::optional<HeadsCall> heads_call(const Plan& plan, const Item& append);

// Such a call in one kernel.
Item heads_item(const HeadsCall& call);

// The parameters of a call, except `rows` and `queries`. Allocates the appended caches if they are not quantized.
HeadsParams heads_params(HeadsCall& call, KernelNode& node);
// The rows of a call where they are contiguous.
void read_rows(HeadsParams& params, const HeadsCall& call, KernelNode& node);
void make_contiguous(HeadsCall& call, const mx::Stream& stream);

}  // namespace mlx_cuda
