// Small-M GEMM with quantized weights, by the kernels of kernels.h.
#include "matmul/grouped/primitive.h"
#include "matmul/quantized/choice.h"
#include "matmul/quantized/quantized.h"
#include "runtime/memory.h"

#include <mlx/ops.h>

#include <algorithm>
#include <memory>

namespace mlx_cuda {

namespace {

constexpr int kGroupedMultiple = 8;  // K of a grouped GEMM is a multiple of this
constexpr int kUpstreamTile = 64;    // MLX's kernels sum floats of 4 and 8 bits over multiples of this

// Inputs: x, the weights, and where the state says so lhs and rhs.
class QuantizedSmallM final : public Stateful<WeightedState> {
 public:
  QuantizedSmallM(const mx::Stream& stream, const WeightedState& state, std::shared_ptr<mx::Primitive> upstream)
      : Stateful(stream, state), upstream_(std::move(upstream)) {}
  DEFINE_NAME(QuantizedSmallM)

  std::optional<RowWeights> row_weights(const Arrays& inputs) const {
    const mx::array& x = inputs[0];
    const bool rows = !state_.has_rhs || (x.shape(-2) == 1 && (!state_.has_lhs || x.shape(0) == 1));
    return rows && state_.transpose ? std::optional(RowWeights{state_.weights(inputs), indices(inputs).second}) : std::nullopt;
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    return Stateful::is_equivalent(other) && !upstream_ == !static_cast<const QuantizedSmallM&>(other).upstream_;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    const mx::array& x = inputs[0];
    mx::Shape shape = x.shape();
    if (state_.has_rhs) {
      shape = inputs.back().shape();
      shape.push_back(x.shape(-2));
      shape.push_back(0);
    }
    shape.back() = state_.columns(inputs);
    return {shape};
  }

  // The tangent of x: the same GEMM of its tangent.
  Arrays jvp(const Arrays& primals, const Arrays& tangents, const std::vector<int>& argnums) override {
    if (argnums != std::vector<int>{0}) {
      return Fused::jvp(primals, tangents, argnums);
    }
    const auto [lhs, rhs] = indices(primals);
    return {quantized_small_m(
        tangents[0], state_.weights(primals), lhs, rhs, state_.transpose, upstream_ != nullptr, state_.sorted, queue())};
  }

  // The gradient of x: one more GEMM, with w transposed.
  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums, const Arrays& outputs) override {
    Arrays gradients;
    for (const int argnum : argnums) {
      const auto own = argnum == 0 ? x_gradient(primals, cotangents[0]) : std::nullopt;
      gradients.push_back(own ? *own : Fused::vjp(primals, cotangents, {argnum}, outputs)[0]);
    }
    return gradients;
  }

  // A batch of x only is more rows.
  std::pair<Arrays, std::vector<int>> vmap(const Arrays& inputs, const std::vector<int>& axes) override {
    const QuantizedWeights in = state_.weights(inputs);
    if (state_.has_rhs || std::any_of(axes.begin() + 1, axes.end(), [](int axis) { return axis >= 0; })) {
      return Fused::vmap(inputs, axes);
    }
    const mx::array x = mx::moveaxis(inputs[0], axes[0], 0, queue());
    return {{quantized_small_m(x, in, std::nullopt, std::nullopt, state_.transpose, false, false, queue())}, {0}};
  }

 protected:
  Arrays compose(const Arrays& inputs) const override {
    const QuantizedWeights in = state_.weights(inputs);
    auto [lhs, rhs] = indices(inputs);
    mx::array x = inputs[0];
    if (lhs && state_.sorted) {  // MLX heeds rhs that rises only without lhs: its gradient of float32 scales needs it
      x = mx::take(x, *lhs, 0, queue());
      lhs.reset();
    }
    if (!in.biases && in.inner() % kUpstreamTile != 0) {  // summed over here, or in the gradient of x
      const mx::array values = values_of(in, x.dtype(), queue());
      const mx::array w = state_.transpose ? mx::swapaxes(values, -1, -2, queue()) : values;
      return {rhs ? mx::gather_mm(x, w, lhs, rhs, state_.sorted, queue()) : mx::matmul(x, w, queue())};
    }
    if (rhs) {
      return {mx::gather_qmm(
          x, in.w, in.scales, in.biases, lhs, rhs, state_.transpose, in.group_size, in.bits, in.mode, std::nullopt, state_.sorted,
          queue())};
    }
    const bool vector = x.ndim() == 1;  // MLX's kernels take none
    x = vector ? mx::expand_dims(x, 0, queue()) : x;
    const mx::array out =
        mx::quantized_matmul(x, in.w, in.scales, in.biases, state_.transpose, in.group_size, in.bits, in.mode, queue());
    return {vector ? mx::squeeze(out, 0, queue()) : out};
  }

  void encode(const Arrays& inputs, Arrays& outputs, CommandEncoder& encoder) override {
    mx::array x = inputs[0];
    mx::array& out = outputs[0];
    const QuantizedWeights in = state_.weights(inputs);
    auto [lhs, rhs] = indices(inputs);
    const auto pairs = rhs ? std::optional(static_cast<int>(rhs->size())) : std::nullopt;
    const SmallMKernel kernel = choose_small_m(x, in, pairs, state_.transpose, upstream_ != nullptr);
    if (kernel.engine == SmallMEngine::upstream) {
      upstream_->eval_gpu(inputs, outputs);
      return;
    }
    allocate(out, stream());
    if (!row_distance(x) || !is_aligned(x, *row_distance(x), 16)) {
      x = contiguous_copy(x, encoder, stream());
    }
    const int alignment = kernel.engine == SmallMEngine::plain ? piece_alignment(in.bits) : chunk_alignment(in.bits);
    Readable weights = readable(in, false, alignment, encoder, stream());
    lhs = contiguous(lhs, encoder, stream());
    rhs = contiguous(rhs, encoder, stream());
    const int rows = rhs ? x.shape(-2) : static_cast<int>(x.size() / x.shape(-1));
    encode_small_m({kernel, x, std::move(weights), lhs, rhs, out, state_.transpose, rows, pairs.value_or(1), encoder, stream()});
  }

 private:
  std::pair<MaybeArray, MaybeArray> indices(const Arrays& inputs) const {
    const auto rhs = state_.has_rhs ? std::optional(inputs.back()) : std::nullopt;
    return {state_.has_lhs ? std::optional(inputs.end()[state_.has_rhs ? -2 : -1]) : std::nullopt, rhs};
  }

  // None where MLX computes it: of pairs that the grouped kernels do not take.
  MaybeArray x_gradient(const Arrays& primals, const mx::array& cotangent) const {
    const mx::array& x = primals[0];
    const QuantizedWeights in = state_.weights(primals);
    const auto [lhs, rhs] = indices(primals);
    if (!rhs) {
      return state_.transpose ? dequantize_then_gemm(cotangent, in, false, queue())
                              : quantized_small_m(cotangent, in, std::nullopt, std::nullopt, true, false, false, queue());
    }
    if (!state_.transpose || x.dtype() == mx::float32 || cotangent.shape(-1) % kGroupedMultiple != 0) {
      return std::nullopt;
    }
    // Rows in the order of their matrices, and back.
    const int rows = x.shape(-2);
    const mx::array order = mx::argsort(*rhs, queue());
    const mx::array first = expert_offsets(mx::take(*rhs, order, queue()), in.w.shape(0), queue());
    const mx::array offsets = mx::multiply(first, mx::array(rows), queue());
    const mx::array sorted = mx::flatten(mx::take(cotangent, order, 0, queue()), 0, 1, queue());
    const mx::array results = grouped_quantized(sorted, in, offsets, false, queue());
    const mx::array each = mx::take(mx::unflatten(results, 0, {-1, rows}, queue()), mx::argsort(order, queue()), 0, queue());
    if (!lhs) {
      return mx::reshape(each, x.shape(), queue());
    }
    const mx::array updates = mx::expand_dims(mx::astype(each, mx::float32, queue()), 1, queue());
    const mx::array sums = mx::scatter_add(mx::zeros(x.shape(), mx::float32, queue()), *lhs, updates, 0, queue());
    return mx::astype(sums, x.dtype(), queue());
  }

  std::shared_ptr<mx::Primitive> upstream_;  // MLX's own, which is called where it takes the layouts
};

}  // namespace

mx::array quantized_small_m(
    const mx::array& x,
    const QuantizedWeights& weights,
    const MaybeArray& lhs_indices,
    const MaybeArray& rhs_indices,
    bool transpose,
    bool small,
    bool sorted,
    const mx::Stream& stream) {
  if (!can_copy(x)) {  // there are no indices, and the leading dimensions are rows
    const mx::Shape leading(x.shape().begin(), x.shape().end() - 1);
    const mx::array rows = mx::flatten(x, 0, -2, stream);
    return mx::unflatten(
        quantized_small_m(rows, weights, lhs_indices, rhs_indices, transpose, small, sorted, stream), 0, leading, stream);
  }
  std::shared_ptr<mx::Primitive> upstream;
  if (small && x.ndim() > 1) {  // MLX's kernels take no vector
    const QuantizedWeights& in = weights;
    upstream =
        mx::quantized_matmul(x, in.w, in.scales, in.biases, transpose, in.group_size, in.bits, in.mode, stream).primitive_ptr();
  }
  WeightedState state(weights, transpose);
  state.has_lhs = lhs_indices.has_value();
  state.has_rhs = rhs_indices.has_value();
  state.sorted = sorted;
  return result_of<QuantizedSmallM>(inputs_with({x}, weights, lhs_indices, rhs_indices), x.dtype(), stream, state, upstream);
}

std::optional<RowWeights> row_weights(const mx::array& out) {
  const auto* own = dynamic_cast<const QuantizedSmallM*>(&out.primitive());
  return own ? own->row_weights(out.inputs()) : std::nullopt;
}

}  // namespace mlx_cuda
