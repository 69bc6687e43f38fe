#include "attention/composed.h"
#include "attention/cudnn/attention.h"
#include "attention/cudnn/primitive.h"

#include <mlx/ops.h>
#include <mlx/transforms.h>

namespace mlx_cuda {

namespace {

// Inputs: q, k, lse and perhaps sinks. The result is the third, unchanged.
class AttentionLse final : public Sdpa {
 public:
  AttentionLse(const mx::Stream& stream, const AttentionOptions& options) : Sdpa(stream, options, 3) {}

  DEFINE_NAME(AttentionLse)

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    return {inputs[2].shape()};
  }

  // The sum's share of key j is its probability p_ij, so the gradient of q_i is scale * sum_j p_ij k_j, attention with the keys as
  // values; that of k_j is scale * sum_i p_ij q_i, the gradient of those values.
  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums, const Arrays& outputs) override {
    const mx::array& q = primals[0];
    const mx::array& k = primals[1];
    AttentionArrays in = with_keys_as_values(primals);
    if (!why_attention_unsupported(in, options().with_lse(true), queue()).empty()) {
      return Fused::vjp(primals, cotangents, argnums, outputs);
    }
    const mx::array factor = mx::multiply(mx::expand_dims(cotangents[0], 3, queue()), mx::array(options().scale), queue());
    auto mean_key = [&](const Arrays& values) {
      in.v = values[0];
      return attention(in, options().with_lse(false), queue());
    };
    Arrays wanted;
    for (const int argnum : argnums) {
      if (argnum == 0) {
        wanted.push_back(mx::astype(mx::multiply(factor, to_float32(mean_key({k})[0], queue()), queue()), q.dtype(), queue()));
      } else if (argnum == 1) {
        const mx::array weighted = mx::astype(mx::multiply(factor, to_float32(q, queue()), queue()), q.dtype(), queue());
        wanted.push_back(mx::vjp(mean_key, {k}, {weighted}).second[0]);
      } else if (argnum == 2) {
        wanted.push_back(mx::zeros_like(primals[2], queue()));
      } else {
        const mx::array sink = mx::expand_dims(*in.sinks, 1, queue());
        const mx::array share = mx::exp(mx::subtract(sink, outputs[0], queue()), queue());
        wanted.push_back(mx::sum(mx::multiply(cotangents[0], share, queue()), {0, 2}, false, queue()));
      }
    }
    return wanted;
  }

 protected:
  Arrays again(const Arrays& in) const override {
    return {differentiable_lse(arrays(in), in[2], options(), queue())};
  }

  Arrays compose(const Arrays& inputs) const override {
    return {composed_attention(with_keys_as_values(inputs), options().with_lse(true), queue())[1]};
  }

  void encode(const Arrays& inputs, Arrays& outputs, CommandEncoder&) override {
    outputs[0].copy_shared_buffer(inputs[2]);
  }

 private:
  // The call that the logarithms are of: any values do.
  AttentionArrays with_keys_as_values(const Arrays& inputs) const {
    AttentionArrays in = arrays(inputs);
    in.v = in.k;
    return in;
  }
};

}  // namespace

mx::array differentiable_lse(
    const AttentionArrays& in, const mx::array& lse, const AttentionOptions& options, const mx::Stream& stream) {
  Arrays inputs = joined({in.q, in.k, mx::stop_gradient(lse, stream)}, in.sinks);
  return result_of<AttentionLse>(std::move(inputs), lse.dtype(), stream, options.with_lse(false));
}

}  // namespace mlx_cuda
