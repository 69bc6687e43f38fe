#include "attention/composed.h"
#include "attention/cudnn/attention.h"
#include "attention/cudnn/primitive.h"
#include "runtime/memory.h"

#include <mlx/fast.h>
#include <mlx/ops.h>
#include <mlx/transforms.h>

#include <algorithm>

namespace mlx_cuda {

namespace {

// Inputs: q, k, v and perhaps sinks, float32. Outputs: attention and, with `lse`, the log-sum-exp, which is for the backward
// pass: it has no gradient here (lse.h has one).
class Attention final : public Sdpa {
 public:
  Attention(const mx::Stream& stream, const AttentionOptions& options) : Sdpa(stream, options, 3) {}

  // Its inputs, by the options.
  static Arrays results(const Arrays& inputs, const AttentionOptions& options, const mx::Stream& stream) {
    return attention_results(std::make_shared<Attention>(stream, options), inputs);
  }

  DEFINE_NAME(Attention)

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    return attention_shapes(inputs[0], inputs[2].shape(3), options().lse);
  }

  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums, const Arrays& outputs) override {
    const auto stream = queue();
    const AttentionArrays in = arrays(primals);
    const AttentionOptions with_lse = options().with_lse(true);
    Arrays gradients;
    const bool has_lse = options().lse || why_attention_unsupported(in, with_lse, stream).empty();
    if (has_lse && why_backward_unsupported(in, options(), stream).empty()) {
      const Arrays both = options().lse ? outputs : results(primals, with_lse, stream);
      gradients = attention_gradients(in, both, cotangents[0], options(), stream);
      if (in.sinks) {
        gradients.push_back(sink_gradient(in, both, cotangents[0]));
      }
    } else {
      auto composition = [this](const Arrays& of) { return composed(of); };
      gradients = mx::vjp(composition, primals, {cotangents[0]}).second;
    }
    Arrays wanted;
    for (const int argnum : argnums) {
      wanted.push_back(gradients[argnum]);
    }
    return wanted;
  }

 protected:
  Arrays again(const Arrays& inputs) const override {
    const bool fused = why_attention_unsupported(arrays(inputs), options(), queue()).empty();
    return fused ? results(inputs, options(), queue()) : compose(inputs);
  }

  Arrays compose(const Arrays& inputs) const override {
    return options().lse ? composed_attention(arrays(inputs), options(), queue()) : composed(inputs);
  }

  void encode(const Arrays& inputs, Arrays& outputs, CommandEncoder& encoder) override {
    auto bind = [&](SdpaProblem& problem, bool dense) {
      VariantPack pack;
      auto read = [&](Uid uid, int i, auto& strides) { pack.read(uid, readable(inputs[i], dense, encoder, stream()), strides); };
      read(Uid::q, 0, problem.q);
      read(Uid::k, 1, problem.k);
      read(Uid::v, 2, problem.v);
      pack.write(Uid::out, outputs[0], pack.inputs[0].second, problem.out, stream());  // so the next reshape needs no copy
      if (problem.sinks) {
        pack.inputs.emplace_back(Uid::sinks, readable(inputs[3], true, encoder, stream()));
      }
      if (options().lse) {
        allocate(outputs[1], stream());
        pack.outputs.emplace_back(Uid::stats, outputs[1]);
      }
      return pack;
    };
    encode_problem(make_problem(arrays(inputs), options()), "problem", bind, encoder);
  }

 private:
  // The attention alone.
  Arrays composed(const Arrays& inputs) const {
    mx::cu::device(queue().device).make_current();
    // MLX's own function cannot pass the options that cuDNN's backward pass needs.
    const bool lengths_wanted = make_backward_problem(arrays(inputs), options()).lengths_given;
    if (lengths_wanted || options().window_left >= 0 || inputs.size() > 3) {
      return composed_attention(arrays(inputs), options().with_lse(false), queue());
    }
    return {mx::fast::scaled_dot_product_attention(
        inputs[0], inputs[1], inputs[2], options().scale, options().window_right == 0 ? "causal" : "", {}, {}, false, queue())};
  }

  // A sink takes its share exp(sink - lse) of the softmax and adds nothing, so each query's output shrinks by that share.
  mx::array sink_gradient(const AttentionArrays& in, const Arrays& results, const mx::array& d_out) const {
    const auto stream = queue();
    const mx::array lse = differentiable_lse(in, results[1], options(), stream);
    const mx::array share = mx::exp(mx::subtract(mx::expand_dims(*in.sinks, 1, stream), lse, stream), stream);
    const mx::array terms = mx::multiply(to_float32(results[0], stream), to_float32(d_out, stream), stream);
    const mx::array shrinking = mx::multiply(share, mx::sum(terms, 3, false, stream), stream);
    return mx::negative(mx::sum(shrinking, {0, 2}, false, stream), stream);
  }
};

}  // namespace

std::string why_attention_unsupported(const AttentionArrays& in, const AttentionOptions& options, const mx::Stream& stream) {
  return why_unsupported(make_problem(in, options), stream);
}

Arrays attention(const AttentionArrays& in, const AttentionOptions& options, const mx::Stream& stream) {
  AttentionArrays own{in.q, in.k, in.v};
  if (in.sinks) {
    own.sinks = mx::contiguous(to_float32(*in.sinks, stream), false, stream);
  }
  const Arrays inputs = joined({in.q, in.k, in.v}, own.sinks);
  const bool traced = std::any_of(inputs.begin(), inputs.end(), [](const mx::array& input) { return input.is_tracer(); });
  if (!traced) {
    return Attention::results(inputs, options, stream);
  }
  // Perhaps it is differentiated: the backward wants lse.
  const AttentionOptions with_lse = options.with_lse(true);
  const bool lse = options.lse || (why_backward_unsupported(own, options, stream).empty() &&
                                   why_attention_unsupported(own, with_lse, stream).empty());
  const Arrays results = Attention::results(inputs, options.with_lse(lse), stream);
  if (!options.lse) {
    return {results[0]};
  }
  return {results[0], differentiable_lse(own, results[1], options, stream)};
}

}  // namespace mlx_cuda
