// Common parts of the primitives of linear attention: a call's arrays among the inputs, and as kernel parameters.
#pragma once

#include "recurrence/chunked_params.h"
#include "recurrence/linear_attention.h"
#include "recurrence/recurrent_params.h"
#include "runtime/node.h"

#include <cstddef>
#include <cstdint>

namespace mlx_cuda {

// Which inputs there are, in the order of LinearAttention.
struct Parts {
  Way way;
  bool state, mask, offsets;
  std::size_t count() const {
    return 5 + state + mask + offsets;
  }
  bool operator==(const Parts&) const = default;
};

Parts parts_of(const LinearAttention& in, Way way);
Arrays to_inputs(const LinearAttention& in);
LinearAttention from_inputs(const Arrays& in, const Parts& parts);

Operand operand(const mx::array& in, KernelNode& node);

// All except the states and results; the node is marked as reading them.
Recurrence describe(const LinearAttention& in, bool delta, KernelNode& node);

// The memory of Prepared.
struct PreparedMemory {
  std::int64_t w, v, p, decay;  // bytes for a chunk of one head

  explicit PreparedMemory(int value_size);
  std::int64_t bytes() const {
    return w + v + p + decay;
  }
  // Where they are for so many chunks of so many heads.
  Prepared divide(char* base, int chunks, std::int64_t heads) const;
};

}  // namespace mlx_cuda
