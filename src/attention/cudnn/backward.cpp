#include "attention/cudnn/backward.h"

#include "attention/cudnn/primitive.h"

#include <mlx/ops.h>
#include <mlx/transforms.h>

#include <memory>

namespace mlx_cuda {

namespace {

// Inputs: q, k, v, out, lse, the gradient of out, and perhaps sinks, which are in lse already: only derivatives of this ask for
// them.
class AttentionBackward final : public Sdpa {
 public:
  AttentionBackward(const mx::Stream& stream, const CudnnOptions& options) : Sdpa(stream, options, 6) {}

  const char* name() const override {
    return "AttentionBackward";
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    return {inputs[0].shape(), inputs[1].shape(), inputs[2].shape()};
  }

 protected:
  std::vector<mx::array> again(const std::vector<mx::array>& in) const override {
    if (!why_backward_unsupported(in[0], in[1], in[2], options_, queue()).empty()) {
      return compose(in);
    }
    return attention_gradients(in[0], in[1], in[2], sinks_of(in), in[3], in[4], in[5], options_, queue());
  }

  std::vector<mx::array> compose(const std::vector<mx::array>& inputs) const override {
    auto forward = [&](const std::vector<mx::array>& in) {
      return std::vector<mx::array>{
          composed_attention(in[0], in[1], in[2], extras_of(inputs), composed_options(options_), queue())};
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
    encode_problem(make_backward_problem(inputs[0], inputs[1], inputs[2], options_), "backward", bind, encoder);
  }
};

}  // namespace

std::string why_backward_unsupported(
    const mx::array& q, const mx::array& k, const mx::array& v, const CudnnOptions& options, const mx::Stream& stream) {
  return why_unsupported(make_backward_problem(q, k, v, options), stream);
}

std::vector<mx::array> attention_gradients(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    const std::optional<mx::array>& sinks,
    const mx::array& out,
    const mx::array& lse,
    const mx::array& d_out,
    const CudnnOptions& options,
    const mx::Stream& stream) {
  std::vector<mx::array> inputs{q, k, v, mx::stop_gradient(out, stream), mx::stop_gradient(lse, stream), d_out};
  if (sinks) {
    inputs.push_back(*sinks);
  }
  return mx::array::make_arrays(
      {q.shape(), k.shape(), v.shape()}, {q.dtype(), k.dtype(), v.dtype()}, std::make_shared<AttentionBackward>(stream, options),
      inputs);
}

}  // namespace mlx_cuda
