#include "attention/cudnn/backward.h"

#include "attention/cudnn/library.h"
#include "runtime/fused.h"

#include <mlx/ops.h>
#include <mlx/transforms.h>

#include <memory>
#include <stdexcept>

namespace mlx_cuda {

namespace {

// Inputs: q, k, v, out, lse, the gradient of out, and perhaps sinks, which are in lse already: only derivatives of this ask for
// them.
class AttentionBackward final : public Fused {
 public:
  AttentionBackward(const mx::Stream& stream, const CudnnOptions& options) : Fused(stream), options_(options) {}

  const char* name() const override {
    return "AttentionBackward";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    return options_ == static_cast<const AttentionBackward&>(other).options_;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    return {inputs[0].shape(), inputs[1].shape(), inputs[2].shape()};
  }

  std::pair<std::vector<mx::array>, std::vector<int>> vmap(
      const std::vector<mx::array>& inputs, const std::vector<int>& axes) override {
    if (inputs.size() > 6 && axes[6] >= 0) {
      return Fused::vmap(inputs, axes);
    }
    const auto [in, size] = joined({inputs.begin(), inputs.begin() + 6}, axes, queue());
    if (!why_backward_unsupported(in[0], in[1], in[2], options_, queue()).empty()) {
      return Fused::vmap(inputs, axes);
    }
    return parted(
        attention_gradients(in[0], in[1], in[2], sinks_of(inputs), in[3], in[4], in[5], options_, queue()), size, queue());
  }

 protected:
  std::vector<mx::array> compose(const std::vector<mx::array>& inputs) const override {
    AttentionExtras extras;
    extras.sinks = sinks_of(inputs);
    auto forward = [&](const std::vector<mx::array>& in) {
      return std::vector<mx::array>{composed_attention(in[0], in[1], in[2], extras, composed_options(options_), queue())};
    };
    return mx::vjp(forward, {inputs[0], inputs[1], inputs[2]}, {inputs[5]}).second;
  }

  void encode(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs, mx::cu::CommandEncoder& encoder) override {
    AttentionBackwardProblem problem = make_backward_problem(inputs[0], inputs[1], inputs[2], options_);
    AttentionProblem& forward = problem.forward;
    const mx::array lse = readable(inputs[4], true, encoder, stream());
    for (const bool dense : {false, true}) {  // cuDNN took the shapes with contiguous operands when the graph was built
      auto operand = [&](int i) { return readable(inputs[i], dense, encoder, stream()); };
      const mx::array q = operand(0);
      const mx::array k = operand(1);
      const mx::array v = operand(2);
      const mx::array out = operand(3);
      const mx::array d_out = operand(5);
      forward.q = strides_of(q);
      forward.k = strides_of(k);
      forward.v = strides_of(v);
      forward.out = strides_of(out);
      problem.d_out = strides_of(d_out);
      problem.d_q = allocate_like(outputs[0], q, stream());
      problem.d_k = allocate_like(outputs[1], k, stream());
      problem.d_v = allocate_like(outputs[2], v, stream());
      if (encode_attention(
              problem,
              {{Operand::q, q},
               {Operand::k, k},
               {Operand::v, v},
               {Operand::out, out},
               {Operand::lse, lse},
               {Operand::d_out, d_out}},
              {{Operand::d_q, outputs[0]}, {Operand::d_k, outputs[1]}, {Operand::d_v, outputs[2]}}, encoder, stream())) {
        return;
      }
    }
    throw std::runtime_error(
        "[attention] cuDNN refused a backward that it had accepted: " + why_unsupported(problem, encoder.device()));
  }

 private:
  static std::optional<mx::array> sinks_of(const std::vector<mx::array>& inputs) {
    return inputs.size() > 6 ? std::optional(inputs[6]) : std::nullopt;
  }

  CudnnOptions options_;
};

}  // namespace

std::string why_backward_unsupported(
    const mx::array& q, const mx::array& k, const mx::array& v, const CudnnOptions& options, const mx::Stream& stream) {
  auto& device = mx::cu::device(stream.device);
  device.make_current();
  return why_unsupported(make_backward_problem(q, k, v, options), device);
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
