// A call of attention: its arrays, its options, and what its primitives have in common.
#pragma once

#include "runtime/fused.h"

#include <array>
#include <memory>
#include <optional>
#include <vector>

namespace mlx_cuda {

// What a query sees, how its scores become weights, and which results are wanted.
struct AttentionOptions {
  float scale = 1;             // > 0
  float softcap = 0;           // 0: none
  int window_left = -1;        // keys before the diagonal; negative: all
  int window_right = -1;       // keys after it; negative: all; 0 is causal
  bool lse = false;            // also the logarithms of the sums that weights are divided by, float32 [B, H, Tq]
  bool deterministic = false;  // gradients have the same bits each time

  bool operator==(const AttentionOptions&) const = default;

  AttentionOptions with_lse(bool wanted) const {
    AttentionOptions same = *this;
    same.lse = wanted;
    return same;
  }
};

struct AttentionArrays {
  mx::array q;                        // [B, H, Tq, D]
  mx::array k;                        // [B, Hkv, Tk, D]
  mx::array v;                        // [B, Hkv, Tk, Dv]
  std::optional<mx::array> table{};   // int32 [B, n]: k and v are pages (decode/primitive.h)
  std::optional<mx::array> mask{};    // bool or of q's dtype, with the shape [B, H, Tq, Tk] (broadcast views are read in place)
  std::optional<mx::array> starts{};  // int32 [B]: the first key of each batch entry
  std::optional<mx::array> ends{};    // int32 [B]: the key after its last; queries are the last ones before it
  std::optional<mx::array> sinks{};   // of q's dtype [H]
};

// Those that there may be, in the order of a primitive's inputs.
inline constexpr std::array kOptionalArrays{
    &AttentionArrays::table, &AttentionArrays::mask, &AttentionArrays::starts, &AttentionArrays::ends, &AttentionArrays::sinks};

// What tells calls apart beside the shapes: the options, and which of the optional arrays there are.
struct AttentionState {
  AttentionOptions options;
  std::array<bool, kOptionalArrays.size()> given;

  bool operator==(const AttentionState&) const = default;
};

// Attention with all that a call may have. Inputs: its arrays. Outputs: [B, H, Tq, Dv] and, if wanted, lse.
class AttentionPrimitive : public Stateful<AttentionState> {
 public:
  using Stateful::Stateful;

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override;

 protected:
  AttentionArrays arrays(const std::vector<mx::array>& inputs) const;

  const AttentionOptions& options() const {
    return state_.options;
  }
};

// The outputs of a primitive of attention: the first of its inputs' dtype, and lse.
std::vector<mx::array> attention_results(std::shared_ptr<mx::Primitive> primitive, const std::vector<mx::array>& inputs);

// Shapes of the outputs of attention.
std::vector<mx::Shape> attention_shapes(const mx::array& q, const mx::array& v, bool lse);

std::vector<mx::array> inputs_of(const AttentionArrays& in);

template <typename P>
std::vector<mx::array> attention_by(const AttentionArrays& in, const AttentionOptions& options, const mx::Stream& stream) {
  AttentionState state{options, {}};
  for (std::size_t i = 0; i < kOptionalArrays.size(); ++i) {
    state.given[i] = (in.*kOptionalArrays[i]).has_value();
  }
  return attention_results(std::make_shared<P>(stream, state), inputs_of(in));
}

// Gives the output memory, as row-contiguous [B, T, H, D] where q is so, as projections leave it: the next reshape needs no copy
// then.
void allocate_like_queries(mx::array& out, const mx::array& q, const mx::Stream& stream);

}  // namespace mlx_cuda
