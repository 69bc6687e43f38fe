#include "matmul/dense/gradient.h"

#include "runtime/device_code.h"
#include "runtime/fused.h"

#include <mlx/backend/cuda/utils.h>
#include <mlx/ops.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace mlx_cuda {

namespace {

KernelModule& kernels() {
  static KernelModule module("gradient");
  return module;
}

// In float32, as the kernel.
mx::array slope(const mx::array& saved, Activation activation, const mx::Stream& stream) {
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

// Inputs: the outer gradient [rows, columns] and, with an activation, what was saved. Outputs: the inner gradient, with an
// activation, and the bias's, if it is wanted.
class LinearGradientPrimitive final : public Fused {
 public:
  LinearGradientPrimitive(const mx::Stream& stream, Activation activation, bool with_bias)
      : Fused(stream), activation_(activation), with_bias_(with_bias) {}

  const char* name() const override {
    return "LinearGradient";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& that = static_cast<const LinearGradientPrimitive&>(other);
    return activation_ == that.activation_ && with_bias_ == that.with_bias_;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    std::vector<mx::Shape> shapes;
    if (activation_ != Activation::none) {
      shapes.push_back(inputs[0].shape());
    }
    if (with_bias_) {
      shapes.push_back({inputs[0].shape(1)});
    }
    return shapes;
  }

 protected:
  std::vector<mx::array> compose(const std::vector<mx::array>& inputs) const override {
    const auto stream = queue();
    const mx::Dtype dtype = inputs[0].dtype();
    mx::array inner = mx::astype(inputs[0], mx::float32, stream);
    std::vector<mx::array> results;
    if (activation_ != Activation::none) {
      inner = mx::multiply(inner, slope(inputs[1], activation_, stream), stream);
      results.push_back(mx::astype(inner, dtype, stream));
    }
    if (with_bias_) {
      results.push_back(mx::astype(mx::sum(inner, 0, false, stream), dtype, stream));
    }
    return results;
  }

  void encode(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs, mx::cu::CommandEncoder& encoder) override {
    mx::array outer = inputs[0];
    const bool activated = activation_ != Activation::none;
    auto rows = static_cast<long long>(outer.shape(0));
    auto columns = static_cast<long long>(outer.shape(1));
    auto outer_stride = static_cast<long long>(outer.strides(0));
    if (outer.strides(1) != 1 && columns != 1) {
      outer = contiguous_copy(outer, encoder, stream());
      outer_stride = columns;
    }
    std::optional<mx::array> saved;
    if (activated) {
      saved = inputs[1].flags().row_contiguous ? inputs[1] : contiguous_copy(inputs[1], encoder, stream());
    }
    for (mx::array& out : outputs) {
      allocate(out, stream());
    }

    const void* outer_data = mx::gpu_ptr<void>(outer);
    const void* saved_data = saved ? mx::gpu_ptr<void>(*saved) : nullptr;
    void* inner_data = activated ? mx::gpu_ptr<void>(outputs[0]) : nullptr;
    const long long vector = 16 / static_cast<long long>(outer.itemsize());
    auto fits = [](const void* data) { return reinterpret_cast<std::uintptr_t>(data) % 16 == 0; };
    const bool wide = columns % vector == 0 && (rows == 1 || outer_stride % vector == 0) && fits(outer_data) && fits(saved_data) &&
                      fits(inner_data);
    const long long width = 32 * (wide ? vector : 1);
    constexpr long long rows_at_once = 8 * 2;
    const long long across = (columns + width - 1) / width;
    // Some blocks for each multiprocessor, and not so many that adding up their sums takes long.
    const long long down =
        std::clamp(3 * multiprocessors() / across, 1LL, std::min(256LL, (rows + rows_at_once - 1) / rows_at_once));
    void* partial = workspace(with_bias_ ? static_cast<std::size_t>(down * columns) * sizeof(float) : 0, encoder, stream());

    encoder.set_input_array(outer);
    if (saved) {
      encoder.set_input_array(*saved);
    }
    for (mx::array& out : outputs) {
      encoder.set_output_array(out);
    }
    Activation activation = activation_;
    const std::string type = type_name(outer.dtype());
    const CUfunction kernel = kernels().function("gradient_" + type + (wide ? "_vector" : "_scalar"));
    const dim3 grid(static_cast<unsigned>(across), static_cast<unsigned>(down));
    encoder.add_kernel_node_ex(
        kernel, grid, dim3(256), dim3(), 0, outer_data, outer_stride, saved_data, inner_data, partial, rows, columns, activation);
    if (!with_bias_) {
      return;
    }
    // The same array as output again: the sums come after.
    mx::array& bias = outputs.back();
    encoder.set_input_array(bias);
    encoder.set_output_array(bias);
    void* bias_data = mx::gpu_ptr<void>(bias);
    int parts = static_cast<int>(down);
    const auto blocks = static_cast<unsigned>((columns + 127) / 128);
    encoder.add_kernel_node_ex(
        kernels().function("column_sums_" + type), dim3(blocks), dim3(128), dim3(), 0, partial, bias_data, parts, columns);
  }

 private:
  Activation activation_;
  bool with_bias_;
};

}  // namespace

LinearGradient linear_gradient(
    const mx::array& outer, const mx::array& saved, Activation activation, bool with_bias, const mx::Stream& stream) {
  if (activation == Activation::none && !with_bias) {
    return {outer, std::nullopt};
  }
  auto rows = [&](const mx::array& in) { return in.ndim() == 1 ? mx::expand_dims(in, 0, stream) : mx::flatten(in, 0, -2, stream); };
  std::vector<mx::array> inputs{rows(outer)};
  if (activation != Activation::none) {
    inputs.push_back(rows(saved));
  }
  auto primitive = std::make_shared<LinearGradientPrimitive>(stream, activation, with_bias);
  const auto shapes = primitive->output_shapes(inputs);
  const std::vector<mx::Dtype> dtypes(shapes.size(), outer.dtype());
  std::vector<mx::array> results = mx::array::make_arrays(shapes, dtypes, primitive, inputs);
  const std::optional<mx::array> bias = with_bias ? std::optional(results.back()) : std::nullopt;
  return {activation == Activation::none ? outer : mx::reshape(results[0], outer.shape(), stream), bias};
}

}  // namespace mlx_cuda
