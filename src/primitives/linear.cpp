#include "primitives/linear.h"

#include "runtime/kernels.h"

#include <mlx/backend/cuda/utils.h>
#include <mlx/ops.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <stdexcept>
#include <string>

// Defined in the source that the build generates from kernels/epilogue.cu.
extern const std::uint64_t mlx_cuda_fatbin_epilogue[];

namespace mlx_cuda {

namespace {

KernelModule& kernels() {
  static KernelModule module(mlx_cuda_fatbin_epilogue);
  return module;
}

// The leading dimension of a matrix that is row-major but for the distance of its rows; none when it is not, or when rows overlap.
std::optional<std::int64_t> leading_dimension(
    std::int64_t rows, std::int64_t columns, std::int64_t row_stride, std::int64_t column_stride) {
  if (columns != 1 && column_stride != 1) {
    return std::nullopt;
  }
  if (rows == 1) {
    return columns;
  }
  return row_stride >= columns ? std::optional(row_stride) : std::nullopt;
}

// In float32, because x^3 and its derivative overflow float16 from |x| = 40 on.
mx::array gelu_approx(const mx::array& x, const mx::Stream& stream) {
  auto constant = [](double value) { return mx::array(static_cast<float>(value)); };
  const auto cube = mx::multiply(mx::square(x, stream), x, stream);
  const auto sum = mx::add(x, mx::multiply(constant(0.044715), cube, stream), stream);
  const auto inside = mx::multiply(constant(std::sqrt(2 / std::numbers::pi)), sum, stream);
  const auto gate = mx::add(constant(1), mx::tanh(inside, stream), stream);
  return mx::multiply(mx::multiply(constant(0.5), x, stream), gate, stream);
}

class Linear final : public Fused {
 public:
  Linear(const mx::Stream& stream, Activation activation) : Fused(stream), activation_(activation) {}

  const char* name() const override {
    return "Linear";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    return activation_ == static_cast<const Linear&>(other).activation_;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    mx::Shape shape = inputs[0].shape();
    shape.back() = inputs[1].shape(0);
    return {shape};
  }

  // A batch of x only is more rows.
  std::pair<std::vector<mx::array>, std::vector<int>> vmap(
      const std::vector<mx::array>& inputs, const std::vector<int>& axes) override {
    if (std::any_of(axes.begin() + 1, axes.end(), [](int axis) { return axis >= 0; })) {
      return Fused::vmap(inputs, axes);
    }
    const mx::array x = mx::moveaxis(inputs[0], axes[0], 0, queue());
    const auto bias = inputs.size() > 2 ? std::optional(inputs[2]) : std::nullopt;
    return {{linear(x, inputs[1], bias, activation_, queue())}, {0}};
  }

 protected:
  std::vector<mx::array> compose(const std::vector<mx::array>& inputs) const override {
    const auto stream = queue();
    mx::array y = mx::matmul(inputs[0], mx::transpose(inputs[1], stream), stream);
    if (inputs.size() > 2) {
      y = mx::add(y, inputs[2], stream);
    }
    switch (activation_) {
      case Activation::relu:
        return {mx::maximum(y, mx::array(0.0f, y.dtype()), stream)};
      case Activation::gelu_approx:
        return {mx::astype(gelu_approx(mx::astype(y, mx::float32, stream), stream), y.dtype(), stream)};
      case Activation::none:
        break;
    }
    return {y};
  }

  void encode(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs, mx::cu::CommandEncoder& encoder) override {
    mx::array& out = outputs[0];
    mx::array x = inputs[0];
    mx::array w = inputs[1];
    LinearProblem problem{
        .dtype = out.dtype(),
        .rows = static_cast<std::int64_t>(x.size()) / x.shape(-1),
        .columns = w.shape(0),
        .inner = w.shape(1),
        .x_stride = 0,
        .w_stride = 0,
        .w_transposed = false,
        .has_bias = inputs.size() > 2,
        .activation = activation_,
    };
    const auto x_rows = row_distance(x);
    const auto x_leading = x_rows ? leading_dimension(problem.rows, problem.inner, *x_rows, x.strides(-1)) : std::nullopt;
    if (!x_leading) {
      x = contiguous_copy(x, encoder, stream());
    }
    problem.x_stride = x_leading.value_or(problem.inner);

    const auto w_leading = leading_dimension(w.shape(0), w.shape(1), w.strides(0), w.strides(1));
    const auto w_transposed_leading = leading_dimension(w.shape(1), w.shape(0), w.strides(1), w.strides(0));
    if (!w_leading && !w_transposed_leading) {
      w = contiguous_copy(w, encoder, stream());
    }
    problem.w_transposed = !w_leading && w_transposed_leading;
    problem.w_stride = w_leading ? *w_leading : w_transposed_leading.value_or(problem.inner);

    std::optional<mx::array> bias;
    if (problem.has_bias) {
      bias = inputs[2];
      if (bias->size() > 1 && bias->strides(0) != 1) {
        bias = contiguous_copy(*bias, encoder, stream());
      }
    }
    allocate(out, stream());
    if (encode_linear(problem, x, w, bias ? &*bias : nullptr, out, encoder, stream())) {
      return;
    }
    // Some shapes and alignments have no algorithm with a fused epilogue: the bare product and a kernel of ours instead.
    LinearProblem bare = problem;
    bare.has_bias = false;
    bare.activation = Activation::none;
    if (!encode_linear(bare, x, w, nullptr, out, encoder, stream())) {
      throw std::runtime_error("[linear] cuBLASLt has no algorithm for this product; please report the shapes and dtype.");
    }
    encode_epilogue(bias, out, encoder);
  }

 private:
  void encode_epilogue(const std::optional<mx::array>& bias, mx::array& out, mx::cu::CommandEncoder& encoder) {
    encoder.set_input_array(out);
    if (bias) {
      encoder.set_input_array(*bias);
    }
    encoder.set_output_array(out);
    const char* type = out.dtype() == mx::float32 ? "float32" : out.dtype() == mx::float16 ? "float16" : "bfloat16";
    const CUfunction kernel = kernels().function(std::string("epilogue_") + type);
    void* data = mx::gpu_ptr<void>(out);
    const void* bias_data = bias ? mx::gpu_ptr<void>(*bias) : nullptr;
    auto size = static_cast<long long>(out.size());
    auto columns = static_cast<long long>(out.shape(-1));
    int activation = static_cast<int>(activation_);
    constexpr long long threads = 256;
    const auto blocks = static_cast<unsigned>(std::min<long long>((size + threads - 1) / threads, 1 << 16));
    encoder.add_kernel_node_ex(kernel, dim3(blocks), dim3(threads), dim3(), 0, data, bias_data, size, columns, activation);
  }

  Activation activation_;
};

}  // namespace

mx::array linear(
    const mx::array& x, const mx::array& w, const std::optional<mx::array>& bias, Activation activation, const mx::Stream& stream) {
  if (!can_copy(x)) {  // the leading dimensions are rows anyway
    const mx::array rows = linear(mx::flatten(x, 0, -2, stream), w, bias, activation, stream);
    mx::Shape leading(x.shape().begin(), x.shape().end() - 1);
    return mx::unflatten(rows, 0, leading, stream);
  }
  const bool one_row = x.size() == static_cast<std::size_t>(x.shape(-1));
  if (one_row && !bias && activation == Activation::none) {  // MLX's own matrix-vector kernel is faster than cuBLASLt
    return mx::matmul(x, mx::transpose(w, stream), stream);
  }
  mx::Shape shape = x.shape();
  shape.back() = w.shape(0);
  std::vector<mx::array> inputs{x, w};
  if (bias) {
    inputs.push_back(*bias);
  }
  return mx::array(std::move(shape), x.dtype(), std::make_shared<Linear>(stream, activation), std::move(inputs));
}

}  // namespace mlx_cuda
