#include "attention/composed.h"
#include "attention/cudnn/attention.h"
#include "attention/cudnn/lost_nan.h"
#include "attention/cudnn/primitive.h"

#include <mlx/ops.h>
#include <mlx/transforms.h>

namespace mlx_cuda {

namespace {

// How many rows there are, for each batch.
mx::array lengths(const mx::array& rows, CommandEncoder& encoder) {
  const std::vector<int> all(rows.shape(0), rows.shape(2));
  mx::array result(all.begin(), {rows.shape(0)}, mx::int32);
  encoder.add_temporary(result);
  return result;
}

// Inputs: q, k, v, out, lse, the gradient of out, and perhaps sinks, which lse includes already: only gradients of this read
// them.
class AttentionBackward final : public Sdpa {
 public:
  AttentionBackward(const mx::Stream& stream, const AttentionOptions& options) : Sdpa(stream, options, 6) {}

  DEFINE_NAME(AttentionBackward)

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    return {inputs[0].shape(), inputs[1].shape(), inputs[2].shape()};
  }

 protected:
  Arrays again(const Arrays& inputs) const override {
    const AttentionArrays in = arrays(inputs);
    return why_backward_unsupported(in, options(), queue()).empty()
               ? attention_gradients(in, {inputs[3], inputs[4]}, inputs[5], options(), queue())
               : compose(inputs);
  }

  Arrays compose(const Arrays& inputs) const override {
    auto forward = [&](const Arrays& in) {
      return composed_attention({.q = in[0], .k = in[1], .v = in[2], .sinks = arrays(inputs).sinks}, options(), queue());
    };
    return mx::vjp(forward, {inputs[0], inputs[1], inputs[2]}, {inputs[5]}).second;
  }

  void encode(const Arrays& inputs, Arrays& outputs, CommandEncoder& encoder) override {
    const mx::array lse = readable(inputs[4], true, encoder, stream());
    auto bind = [&](SdpaBackwardProblem& problem, bool dense) {
      VariantPack pack;
      auto read = [&](Uid uid, int i, auto& strides) { pack.read(uid, readable(inputs[i], dense, encoder, stream()), strides); };
      auto write = [&](Uid uid, int i, auto& strides) { pack.write(uid, outputs[i], pack.inputs[i].second, strides, stream()); };
      read(Uid::q, 0, problem.forward.q);
      read(Uid::k, 1, problem.forward.k);
      read(Uid::v, 2, problem.forward.v);
      read(Uid::out, 3, problem.forward.out);
      read(Uid::d_out, 5, problem.d_out);
      pack.inputs.emplace_back(Uid::stats, lse);
      if (problem.lengths_given) {
        pack.inputs.emplace_back(Uid::q_lengths, lengths(inputs[0], encoder));
        pack.inputs.emplace_back(Uid::kv_lengths, lengths(inputs[1], encoder));
      }
      write(Uid::d_q, 0, problem.d_q);
      write(Uid::d_k, 1, problem.d_k);
      write(Uid::d_v, 2, problem.d_v);
      return pack;
    };
    const auto [problem, pack] = encode_problem(make_backward_problem(arrays(inputs), options()), "backward", bind, encoder);
    if (loses_nan()) {
      restore_nan(problem, pack.inputs[0].second, pack.inputs[1].second, outputs[2], encoder);
    }
  }
};

}  // namespace

std::string why_backward_unsupported(const AttentionArrays& in, const AttentionOptions& options, const mx::Stream& stream) {
  mx::cu::device(stream.device).make_current();  // which the problem depends on
  return why_unsupported(make_backward_problem(in, options), stream);
}

Arrays attention_gradients(
    const AttentionArrays& in,
    const Arrays& out_and_lse,
    const mx::array& d_out,
    const AttentionOptions& options,
    const mx::Stream& stream) {
  auto constant = [&](const mx::array& result) { return mx::stop_gradient(result, stream); };
  const Arrays inputs = joined({in.q, in.k, in.v, constant(out_and_lse[0]), constant(out_and_lse[1]), d_out}, in.sinks);
  return results_of<AttentionBackward>(inputs, in.q.dtype(), stream, options.with_lse(false));
}

}  // namespace mlx_cuda
