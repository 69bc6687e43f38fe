#include "primitives/attention.h"

#include "libraries/cudnn.h"
#include "primitives/composed.h"

#include <mlx/fast.h>
#include <mlx/ops.h>

#include <stdexcept>

namespace mlx_cuda {

namespace {

using Strides = AttentionProblem::Strides;

Strides contiguous_strides(const mx::array& in) {
  const std::int64_t row = in.shape(3);
  return {in.shape(1) * in.shape(2) * row, in.shape(2) * row, row};
}

// A dimension of one element may have any stride; it gets the plain one, so that equal layouts share a plan.
Strides strides_of(const mx::array& in) {
  const Strides plain = contiguous_strides(in);
  auto stride = [&](int axis, std::int64_t otherwise) { return in.shape(axis) == 1 ? otherwise : in.strides(axis); };
  return {stride(0, plain.batch), stride(1, plain.head), stride(2, plain.row)};
}

// cuDNN wants head_dim adjacent and every row on 16 bytes; it has no word on strides of 0, and no room for negative ones.
bool readable(const mx::array& in) {
  auto fits = [&](int axis) {
    return in.shape(axis) == 1 || (in.strides(axis) > 0 && (in.strides(axis) * in.itemsize()) % 16 == 0);
  };
  const auto offset = static_cast<std::size_t>(in.offset());
  return (in.strides(3) == 1 || in.shape(3) == 1) && fits(0) && fits(1) && fits(2) && offset % 16 == 0;
}

AttentionProblem make_problem(
    const mx::array& q, const mx::array& k, const mx::array& v, float scale, bool causal, int window_left) {
  return {
      .dtype = q.dtype(),
      .batch = q.shape(0),
      .heads = q.shape(1),
      .kv_heads = k.shape(1),
      .q_length = q.shape(2),
      .kv_length = k.shape(2),
      .head_dim = q.shape(3),
      .scale = scale,
      .causal = causal,
      .window_left = window_left,
      .q = contiguous_strides(q),
      .k = contiguous_strides(k),
      .v = contiguous_strides(v),
      .out = contiguous_strides(q),
  };
}

class Attention final : public Fused {
 public:
  Attention(const mx::Stream& stream, float scale, bool causal, int window_left)
      : Fused(stream), scale_(scale), causal_(causal), window_left_(window_left) {}

  const char* name() const override {
    return "Attention";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& that = static_cast<const Attention&>(other);
    return scale_ == that.scale_ && causal_ == that.causal_ && window_left_ == that.window_left_;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    return {inputs[0].shape()};
  }

  // A further batch dimension joins the batch.
  std::pair<std::vector<mx::array>, std::vector<int>> vmap(
      const std::vector<mx::array>& inputs, const std::vector<int>& axes) override {
    int size = 0;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      size = axes[i] >= 0 ? inputs[i].shape(axes[i]) : size;
    }
    std::vector<mx::array> flat;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      mx::array in = axes[i] >= 0 ? mx::moveaxis(inputs[i], axes[i], 0, queue()) : mx::expand_dims(inputs[i], 0, queue());
      mx::Shape shape = in.shape();
      shape[0] = size;
      flat.push_back(mx::flatten(mx::broadcast_to(in, shape, queue()), 0, 1, queue()));
    }
    // More batches do not change whether cuDNN takes the shape, but ask: the answer decides between two right results.
    const bool fused = why_attention_unsupported(flat[0], flat[1], flat[2], scale_, causal_, window_left_, queue()).empty();
    const mx::array out = fused ? attention(flat[0], flat[1], flat[2], scale_, causal_, window_left_, queue()) : compose(flat);
    return {{mx::unflatten(out, 0, {size, out.shape(0) / size}, queue())}, {0}};
  }

 protected:
  mx::array compose(const std::vector<mx::array>& inputs) const override {
    if (window_left_ >= 0) {
      const AttentionOptions options{.scale = scale_, .window_left = window_left_, .window_right = 0};
      return composed_attention(inputs[0], inputs[1], inputs[2], {}, options, queue());
    }
    return mx::fast::scaled_dot_product_attention(
        inputs[0], inputs[1], inputs[2], scale_, causal_ ? "causal" : "", {}, {}, false, queue());
  }

  void encode(const std::vector<mx::array>& inputs, mx::array& out, mx::cu::CommandEncoder& encoder) override {
    auto operand = [&](const mx::array& in) { return readable(in) ? in : contiguous_copy(in, encoder, stream()); };
    mx::array q = operand(inputs[0]);
    mx::array k = operand(inputs[1]);
    mx::array v = operand(inputs[2]);
    AttentionProblem problem = make_problem(q, k, v, scale_, causal_, window_left_);
    problem.q = strides_of(q);
    problem.k = strides_of(k);
    problem.v = strides_of(v);

    // Projections leave q as a transposed [B, T, H, D]; the output follows it, so that the next reshape needs no copy.
    const std::int64_t dim = q.shape(3);
    const std::int64_t heads = q.shape(1);
    const bool rows_first = q.shape(2) > 1 && heads > 1 && q.strides(1) == dim && q.strides(2) == heads * dim;
    if (rows_first) {
      problem.out = {q.shape(2) * heads * dim, dim, heads * dim};
      allocate(out, {problem.out.batch, problem.out.head, problem.out.row, 1}, stream());
    } else {
      allocate(out, stream());
    }
    if (encode_attention(problem, q, k, v, out, encoder, stream())) {
      return;
    }
    // These strides are refused, but contiguous operands were accepted when the graph was built.
    q = contiguous_copy(q, encoder, stream());
    k = contiguous_copy(k, encoder, stream());
    v = contiguous_copy(v, encoder, stream());
    problem = make_problem(q, k, v, scale_, causal_, window_left_);
    allocate(out, stream());
    if (!encode_attention(problem, q, k, v, out, encoder, stream())) {
      throw std::runtime_error(
          "[attention] cuDNN refused a problem that it had accepted: " + why_unsupported(problem, encoder.device()));
    }
  }

 private:
  float scale_;
  bool causal_;
  int window_left_;
};

}  // namespace

std::string why_attention_unsupported(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    float scale,
    bool causal,
    int window_left,
    const mx::Stream& stream) {
  auto& device = mx::cu::device(stream.device);
  device.make_current();
  return why_unsupported(make_problem(q, k, v, scale, causal, window_left), device);
}

mx::array attention(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    float scale,
    bool causal,
    int window_left,
    const mx::Stream& stream) {
  return mx::array(q.shape(), q.dtype(), std::make_shared<Attention>(stream, scale, causal, window_left), {q, k, v});
}

}  // namespace mlx_cuda
