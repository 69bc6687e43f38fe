#include "matmul/dense/gradient.h"

#include "matmul/dense/kernels.h"
#include "runtime/device_code.h"
#include "runtime/fused.h"
#include "runtime/kernel_table.h"
#include "runtime/node.h"

#include <mlx/ops.h>

#include <algorithm>
#include <string>
#include <vector>

namespace mlx_cuda {

namespace {

KernelModule kernels("gradient");

constexpr auto kGradient =
    std::to_array<KernelRow<std::string_view, bool>>({MLX_CUDA_GRADIENT_KERNELS(MLX_CUDA_KERNEL_ROW, MLX_CUDA_NO_ROW)});
constexpr auto kSums =
    std::to_array<KernelRow<std::string_view>>({MLX_CUDA_GRADIENT_KERNELS(MLX_CUDA_NO_ROW, MLX_CUDA_KERNEL_ROW)});

// In float32, as the kernel.
mx::array derivative(const mx::array& saved, Activation activation, const mx::Stream& stream) {
  auto constant = [](float value) { return mx::array(value); };
  const mx::array x = mx::astype(saved, mx::float32, stream);
  if (activation == Activation::relu) {
    return mx::astype(mx::greater(x, constant(0), stream), mx::float32, stream);
  }
  const mx::array within = mx::clip(x, constant(-16), constant(16), stream);
  const mx::array square = mx::square(within, stream);
  const mx::array cubic = mx::add(constant(1), mx::multiply(constant(0.044715f), square, stream), stream);
  const mx::array twice = mx::multiply(constant(1.5957691216057308f), within, stream);
  const mx::array gate = mx::sigmoid(mx::multiply(twice, cubic, stream), stream);
  const mx::array rest = mx::multiply(gate, mx::subtract(constant(1), gate, stream), stream);
  const mx::array inner = mx::add(constant(1), mx::multiply(constant(0.134145f), square, stream), stream);
  return mx::add(gate, mx::multiply(mx::multiply(twice, rest, stream), inner, stream), stream);
}

struct GradientOptions {
  Activation activation;
  bool with_bias;

  bool operator==(const GradientOptions&) const = default;
};

// Inputs: the outer gradient [rows, columns] and, with an activation, what was saved. Outputs: the inner gradient, with an
// activation, and the bias's, if it is wanted.
class LinearGradientPrimitive final : public Stateful<GradientOptions> {
 public:
  using Stateful::Stateful;

  DEFINE_NAME(LinearGradient)

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    std::vector<mx::Shape> shapes;
    if (state_.activation != Activation::none) {
      shapes.push_back(inputs[0].shape());
    }
    if (state_.with_bias) {
      shapes.push_back({inputs[0].shape(1)});
    }
    return shapes;
  }

 protected:
  Arrays compose(const Arrays& inputs) const override {
    const auto stream = queue();
    const mx::Dtype dtype = inputs[0].dtype();
    mx::array inner = mx::astype(inputs[0], mx::float32, stream);
    Arrays results;
    if (state_.activation != Activation::none) {
      inner = mx::multiply(inner, derivative(inputs[1], state_.activation, stream), stream);
      results.push_back(mx::astype(inner, dtype, stream));
    }
    if (state_.with_bias) {
      results.push_back(mx::astype(mx::sum(inner, 0, false, stream), dtype, stream));
    }
    return results;
  }

  void encode(const Arrays& inputs, Arrays& outputs, CommandEncoder& encoder) override {
    const mx::array outer = with_adjacent_elements(inputs[0], encoder, stream());
    const auto rows = static_cast<long long>(outer.shape(0));
    const auto columns = static_cast<long long>(outer.shape(1));
    const auto outer_stride = static_cast<long long>(outer.strides(0));
    const bool activated = state_.activation != Activation::none;
    const auto saved = activated ? std::optional(contiguous(inputs[1], encoder, stream())) : std::nullopt;
    for (mx::array& out : outputs) {
      allocate(out, stream());
    }

    const long long vector = 16 / static_cast<long long>(outer.itemsize());
    const bool wide = columns % vector == 0 && (rows == 1 || outer_stride % vector == 0) && on_16_bytes(outer) &&
                      (!activated || (on_16_bytes(*saved) && on_16_bytes(outputs[0])));
    const long long across = ceil_div(columns, 32 * (wide ? vector : 1));
    // Some blocks for each multiprocessor, and not so many that adding up their sums takes long.
    constexpr long long rows_at_once = 8 * 2;
    const long long down = std::clamp(3 * multiprocessors() / across, 1LL, std::min(256LL, ceil_div(rows, rows_at_once)));
    void* partial = workspace(state_.with_bias ? static_cast<std::size_t>(down * columns) * sizeof(float) : 0, encoder, stream());

    KernelNode node(encoder);
    const void* outer_data = node.reads(outer);
    const void* saved_data = node.reads(saved);
    for (mx::array& out : outputs) {
      node.writes(out);
    }
    void* inner_data = activated ? mx::gpu_ptr<void>(outputs[0]) : nullptr;
    const std::string type = type_name(outer.dtype());
    const dim3 grid(across, down);
    node.launch(
        kernels.function(kernel_for(kGradient, type, wide)), grid, 256, 0, outer_data, outer_stride, saved_data, inner_data,
        partial, rows, columns, state_.activation);
    if (!state_.with_bias) {
      return;
    }
    // The same array as output again: the sums come after.
    node.reads(outputs.back());
    void* bias = node.writes(outputs.back());
    const int parts = static_cast<int>(down);
    node.launch(kernels.function(kernel_for(kSums, type)), ceil_div(columns, 128), 128, 0, partial, bias, parts, columns);
  }
};

}  // namespace

mx::array as_matrix(const mx::array& in, const mx::Stream& stream) {
  return in.ndim() == 1 ? mx::expand_dims(in, 0, stream) : mx::flatten(in, 0, -2, stream);
}

LinearGradient linear_gradient(
    const mx::array& outer, const mx::array& saved, Activation activation, bool with_bias, const mx::Stream& stream) {
  if (activation == Activation::none && !with_bias) {
    return {outer, std::nullopt};
  }
  const auto point = activation == Activation::none ? std::nullopt : std::optional(as_matrix(saved, stream));
  const Arrays inputs = joined({as_matrix(outer, stream)}, point);
  const Arrays results = results_of<LinearGradientPrimitive>(inputs, outer.dtype(), stream, GradientOptions{activation, with_bias});
  const MaybeArray bias = with_bias ? std::optional(results.back()) : std::nullopt;
  return {activation == Activation::none ? outer : mx::reshape(results[0], outer.shape(), stream), bias};
}

}  // namespace mlx_cuda
