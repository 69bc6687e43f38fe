#include "attention/cudnn/forward.h"

#include "attention/cudnn/backward.h"
#include "attention/cudnn/lse.h"
#include "attention/cudnn/primitive.h"
#include "runtime/memory.h"

#include <mlx/fast.h>
#include <mlx/ops.h>
#include <mlx/transforms.h>

#include <algorithm>
#include <memory>

namespace mlx_cuda {

namespace {

std::vector<mx::array> make_attention(
    const std::vector<mx::array>& inputs, const CudnnOptions& options, bool lse, const mx::Stream& stream);

// Inputs: q, k, v and perhaps sinks, float32. Outputs: the attention and, with `lse`, the logarithm of what its softmax divides by.
// That is for the backward: to the derivatives it is no function of the inputs (lse.h has one that is).
class Attention final : public Sdpa {
 public:
  Attention(const mx::Stream& stream, const CudnnOptions& options, bool lse) : Sdpa(stream, options, 3), lse_(lse) {}

  const char* name() const override {
    return "Attention";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    return Sdpa::is_equivalent(other) && lse_ == static_cast<const Attention&>(other).lse_;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    const auto& q = inputs[0];
    std::vector<mx::Shape> shapes{{q.shape(0), q.shape(1), q.shape(2), inputs[2].shape(3)}};
    if (lse_) {
      shapes.push_back({q.shape(0), q.shape(1), q.shape(2)});
    }
    return shapes;
  }

  std::vector<mx::array> vjp(
      const std::vector<mx::array>& primals,
      const std::vector<mx::array>& cotangents,
      const std::vector<int>& argnums,
      const std::vector<mx::array>& outputs) override {
    const auto stream = queue();
    const mx::array& q = primals[0];
    const mx::array& k = primals[1];
    const mx::array& v = primals[2];
    std::vector<mx::array> gradients;
    const bool has_lse = lse_ || why_attention_unsupported(q, k, v, sinks_of(primals), options_, true, stream).empty();
    if (has_lse && why_backward_unsupported(q, k, v, options_, stream).empty()) {
      const std::vector<mx::array> results = lse_ ? outputs : make_attention(primals, options_, true, stream);
      gradients = attention_gradients(q, k, v, sinks_of(primals), results[0], results[1], cotangents[0], options_, stream);
      if (primals.size() > 3) {
        gradients.push_back(sink_gradient(primals, results, cotangents[0]));
      }
    } else {
      auto composition = [this](const std::vector<mx::array>& in) { return std::vector<mx::array>{composed(in)}; };
      gradients = mx::vjp(composition, primals, {cotangents[0]}).second;
    }
    std::vector<mx::array> wanted;
    for (const int argnum : argnums) {
      wanted.push_back(gradients[argnum]);
    }
    return wanted;
  }

 protected:
  std::vector<mx::array> again(const std::vector<mx::array>& in) const override {
    const bool fused = why_attention_unsupported(in[0], in[1], in[2], sinks_of(in), options_, lse_, queue()).empty();
    return fused ? make_attention(in, options_, lse_, queue()) : compose(in);
  }

  std::vector<mx::array> compose(const std::vector<mx::array>& inputs) const override {
    return lse_
               ? composed_attention_and_lse(inputs[0], inputs[1], inputs[2], extras_of(inputs), composed_options(options_), queue())
               : std::vector<mx::array>{composed(inputs)};
  }

  void encode(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs, mx::cu::CommandEncoder& encoder) override {
    auto bind = [&](SdpaProblem& problem, bool dense) {
      auto operand = [&](int i) { return readable(inputs[i], dense, encoder, stream()); };
      const mx::array q = operand(0);
      const mx::array k = operand(1);
      const mx::array v = operand(2);
      problem.q = strides_of(q);
      problem.k = strides_of(k);
      problem.v = strides_of(v);
      problem.out = allocate_like(outputs[0], q, stream());  // so the next reshape needs no copy
      VariantPack pack{{{Uid::q, q}, {Uid::k, k}, {Uid::v, v}}, {{Uid::out, outputs[0]}}};
      if (problem.sinks) {
        pack.inputs.emplace_back(Uid::sinks, readable(inputs[3], true, encoder, stream()));
      }
      if (lse_) {
        allocate(outputs[1], stream());
        pack.outputs.emplace_back(Uid::stats, outputs[1]);
      }
      return pack;
    };
    encode_problem(make_problem(inputs[0], inputs[1], inputs[2], options_, inputs.size() > 3, lse_), "problem", bind, encoder);
  }

 private:
  mx::array composed(const std::vector<mx::array>& inputs) const {
    if (options_.window_left >= 0 || inputs.size() > 3) {
      return composed_attention(inputs[0], inputs[1], inputs[2], extras_of(inputs), composed_options(options_), queue());
    }
    return mx::fast::scaled_dot_product_attention(
        inputs[0], inputs[1], inputs[2], options_.scale, options_.causal ? "causal" : "", {}, {}, false, queue());
  }

  // A sink takes its share exp(sink - lse) of the softmax and adds nothing, so each query's output shrinks by that share.
  mx::array sink_gradient(
      const std::vector<mx::array>& primals, const std::vector<mx::array>& results, const mx::array& d_out) const {
    const auto stream = queue();
    const mx::array lse = differentiable_lse(primals[0], primals[1], results[1], primals[3], options_, stream);
    const mx::array share = mx::exp(mx::subtract(mx::expand_dims(primals[3], 1, stream), lse, stream), stream);
    const mx::array product = mx::multiply(to_float32(results[0], stream), to_float32(d_out, stream), stream);
    const mx::array shrinking = mx::multiply(share, mx::sum(product, 3, false, stream), stream);
    return mx::negative(mx::sum(shrinking, {0, 2}, false, stream), stream);
  }

  bool lse_;
};

std::vector<mx::array> make_attention(
    const std::vector<mx::array>& inputs, const CudnnOptions& options, bool lse, const mx::Stream& stream) {
  auto primitive = std::make_shared<Attention>(stream, options, lse);
  std::vector<mx::Dtype> dtypes{inputs[0].dtype()};
  if (lse) {
    dtypes.push_back(mx::float32);
  }
  return mx::array::make_arrays(primitive->output_shapes(inputs), dtypes, primitive, inputs);
}

}  // namespace

std::string why_attention_unsupported(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    const std::optional<mx::array>& sinks,
    const CudnnOptions& options,
    bool with_lse,
    const mx::Stream& stream) {
  return why_unsupported(make_problem(q, k, v, options, sinks.has_value(), with_lse), stream);
}

std::vector<mx::array> attention(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    const std::optional<mx::array>& sinks,
    const CudnnOptions& options,
    bool with_lse,
    const mx::Stream& stream) {
  std::vector<mx::array> inputs{q, k, v};
  if (sinks) {
    inputs.push_back(mx::contiguous(to_float32(*sinks, stream), false, stream));
  }
  const bool traced = std::any_of(inputs.begin(), inputs.end(), [](const mx::array& in) { return in.is_tracer(); });
  if (!traced) {
    return make_attention(inputs, options, with_lse, stream);
  }
  // Perhaps it is differentiated: the backward wants lse.
  const bool lse = with_lse || (why_backward_unsupported(q, k, v, options, stream).empty() &&
                                why_attention_unsupported(q, k, v, sinks, options, true, stream).empty());
  std::vector<mx::array> results = make_attention(inputs, options, lse, stream);
  if (!with_lse) {
    return {results[0]};
  }
  const auto wide_sinks = sinks ? std::optional(inputs[3]) : std::nullopt;
  return {results[0], differentiable_lse(q, k, results[1], wide_sinks, options, stream)};
}

}  // namespace mlx_cuda
