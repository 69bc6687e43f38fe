// Common parts of attention's primitives.
#pragma once

#include "attention/call.h"
#include "runtime/fused.h"

#include <memory>

namespace mlx_cuda {

// Which of the optional arrays a call has.
using GivenArrays = std::array<bool, kOptionalArrays.size()>;

// Adds them to the inputs of a primitive, and finds them there again, from the input `next` on.
GivenArrays add_optional(const AttentionArrays& in, Arrays& inputs);
AttentionArrays with_optional(AttentionArrays in, const GivenArrays& given, const Arrays& inputs, std::size_t next);

// The options that distinguish calls of the same shapes.
struct AttentionState {
  AttentionOptions options;
  GivenArrays given;

  bool operator==(const AttentionState&) const = default;
};

// Attention with all that a call may have. Inputs: its arrays. Outputs: [B, H, Tq, Dv] and, if wanted, lse.
class AttentionPrimitive : public Stateful<AttentionState> {
 public:
  using Stateful::Stateful;

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override;

 protected:
  AttentionArrays arrays(const Arrays& inputs) const;

  const AttentionOptions& options() const {
    return state_.options;
  }
};

// The outputs of a primitive of attention: the first of its inputs' dtype, and lse.
Arrays attention_results(std::shared_ptr<mx::Primitive> primitive, const Arrays& inputs);

// Shapes of the outputs of attention.
std::vector<mx::Shape> attention_shapes(const mx::array& q, int value_dim, bool lse);

template <typename P>
Arrays attention_by(const AttentionArrays& in, const AttentionOptions& options, const mx::Stream& stream) {
  Arrays inputs{in.q, in.k, in.v};
  const AttentionState state{options, add_optional(in, inputs)};
  return attention_results(std::make_shared<P>(stream, state), inputs);
}

// Gives the output memory, as row-contiguous [B, T, H, D] where q is so, as projections leave it: the next reshape needs no copy
// then.
void allocate_like_queries(mx::array& out, const mx::array& q, const mx::Stream& stream);

}  // namespace mlx_cuda
