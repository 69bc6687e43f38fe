#include "attention/composed.h"
#include "attention/cudnn/attention.h"
#include "attention/cudnn/primitive.h"

#include <mlx/ops.h>
#include <mlx/transforms.h>

namespace mlx_cuda {

namespace {

// Inputs: q, k, v, out, lse, the gradient of out, and perhaps sinks, which are in lse already: only derivatives of this ask for
// them.
class AttentionBackward final : public Sdpa {
 public:
  AttentionBackward(const mx::Stream& stream, const AttentionOptions& options) : Sdpa(stream, options, 6) {}

  const char* name() const override {
    return "AttentionBackward";
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    return {inputs[0].shape(), inputs[1].shape(), inputs[2].shape()};
  }

 protected:
  std::vector<mx::array> again(const std::vector<mx::array>& inputs) const override {
    const AttentionArrays in = arrays(inputs);
    return why_backward_unsupported(in, options(), queue()).empty()
               ? attention_gradients(in, {inputs[3], inputs[4]}, inputs[5], options(), queue())
               : compose(inputs);
  }

  std::vector<mx::array> compose(const std::vector<mx::array>& inputs) const override {
    auto forward = [&](const std::vector<mx::array>& in) {
      return composed_attention({.q = in[0], .k = in[1], .v = in[2], .sinks = arrays(inputs).sinks}, options(), queue());
    };
    return mx::vjp(forward, {inputs[0], inputs[1], inputs[2]}, {inputs[5]}).second;
  }

  void encode(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs, mx::cu::CommandEncoder& encoder) override {
    const mx::array lse = readable(inputs[4], true, encoder, stream());
    auto bind = [&](SdpaBackwardProblem& problem, bool dense) {
      auto operand = [&](int i) { return readable(inputs[i], dense, encoder, stream()); };
      const mx::array q = operand(0);
      const mx::array k = operand(1);
      const mx::array v = operand(2);
      const mx::array out = operand(3);
      const mx::array d_out = operand(5);
      problem.forward.q = strides_of(q);
      problem.forward.k = strides_of(k);
      problem.forward.v = strides_of(v);
      problem.forward.out = strides_of(out);
      problem.d_out = strides_of(d_out);
      problem.d_q = allocate_like(outputs[0], q, stream());
      problem.d_k = allocate_like(outputs[1], k, stream());
      problem.d_v = allocate_like(outputs[2], v, stream());
      return VariantPack{
          {{Uid::q, q}, {Uid::k, k}, {Uid::v, v}, {Uid::out, out}, {Uid::stats, lse}, {Uid::d_out, d_out}},
          {{Uid::d_q, outputs[0]}, {Uid::d_k, outputs[1]}, {Uid::d_v, outputs[2]}}};
    };
    encode_problem(make_backward_problem(arrays(inputs), options()), "backward", bind, encoder);
  }
};

}  // namespace

std::string why_backward_unsupported(const AttentionArrays& in, const AttentionOptions& options, const mx::Stream& stream) {
  return why_unsupported(make_backward_problem(in, options), stream);
}

std::vector<mx::array> attention_gradients(
    const AttentionArrays& in,
    const std::vector<mx::array>& out_and_lse,
    const mx::array& d_out,
    const AttentionOptions& options,
    const mx::Stream& stream) {
  auto constant = [&](const mx::array& result) { return mx::stop_gradient(result, stream); };
  std::vector<mx::array> inputs{in.q, in.k, in.v, constant(out_and_lse[0]), constant(out_and_lse[1]), d_out};
  if (in.sinks) {
    inputs.push_back(*in.sinks);
  }
  return results_of<AttentionBackward>(inputs, in.q.dtype(), stream, options.with_lse(false));
}

}  // namespace mlx_cuda
