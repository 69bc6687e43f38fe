#include "matmul/dense/linear.h"

#include "matmul/dense/epilogue.h"
#include "matmul/dense/gradient.h"

#include <mlx/backend/cuda/utils.h>
#include <mlx/ops.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <stdexcept>

namespace mlx_cuda {

namespace {

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

std::vector<mx::array> make_linear(
    const std::vector<mx::array>& inputs, Activation activation, bool inside, const mx::Stream& stream);

// What a forward has kept inside, as a function of the layer's inputs: to the derivatives of Linear it is none, so that a first one
// adds no gradient of it. Inputs: those of Linear and what was kept, which is the result.
class LinearInside final : public Fused {
 public:
  using Fused::Fused;

  const char* name() const override {
    return "LinearInside";
  }

  bool is_equivalent(const mx::Primitive&) const override {
    return true;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    return {inputs.back().shape()};
  }

 protected:
  std::vector<mx::array> compose(const std::vector<mx::array>& inputs) const override {
    const auto bias = inputs.size() > 3 ? std::optional(inputs[2]) : std::nullopt;
    return {linear(inputs[0], inputs[1], bias, Activation::none, queue())};
  }

  void encode(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs, mx::cu::CommandEncoder&) override {
    outputs[0].copy_shared_buffer(inputs.back());
  }
};

// Inputs: x, w and perhaps the bias. Outputs: the layer's result and, with `inside`, what gelu_approx was applied to: its slope is
// taken there, and keeping it costs the forward little where the backward would need a product to have it again.
class Linear final : public Fused {
 public:
  Linear(const mx::Stream& stream, Activation activation, bool inside) : Fused(stream), activation_(activation), inside_(inside) {}

  const char* name() const override {
    return "Linear";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& that = static_cast<const Linear&>(other);
    return activation_ == that.activation_ && inside_ == that.inside_;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    mx::Shape shape = inputs[0].shape();
    shape.back() = inputs[1].shape(0);
    return std::vector<mx::Shape>(inside_ ? 2 : 1, shape);
  }

  std::vector<mx::array> vjp(
      const std::vector<mx::array>& primals,
      const std::vector<mx::array>& cotangents,
      const std::vector<int>& argnums,
      const std::vector<mx::array>& outputs) override {
    const auto stream = queue();
    const mx::array& x = primals[0];
    const mx::array& w = primals[1];
    const bool bias_wanted = std::find(argnums.begin(), argnums.end(), 2) != argnums.end();
    const LinearGradient gradient = linear_gradient(cotangents[0], saved(primals, outputs), activation_, bias_wanted, stream);
    auto rows = [&](const mx::array& in) {
      return in.ndim() == 1 ? mx::expand_dims(in, 0, stream) : mx::flatten(in, 0, -2, stream);
    };
    std::vector<mx::array> wanted;
    for (const int argnum : argnums) {
      if (argnum == 0) {
        wanted.push_back(linear(gradient.inner, mx::transpose(w, stream), std::nullopt, Activation::none, stream));
      } else if (argnum == 1) {
        const mx::array columns = mx::transpose(rows(gradient.inner), stream);
        wanted.push_back(linear(columns, mx::transpose(rows(x), stream), std::nullopt, Activation::none, stream));
      } else {
        wanted.push_back(*gradient.bias);
      }
    }
    return wanted;
  }

  // A batch of x only is more rows.
  std::pair<std::vector<mx::array>, std::vector<int>> vmap(
      const std::vector<mx::array>& inputs, const std::vector<int>& axes) override {
    if (std::any_of(axes.begin() + 1, axes.end(), [](int axis) { return axis >= 0; })) {
      return Fused::vmap(inputs, axes);
    }
    const mx::array x = mx::moveaxis(inputs[0], axes[0], 0, queue());
    std::vector<mx::array> batched{x, inputs[1]};
    batched.insert(batched.end(), inputs.begin() + 2, inputs.end());
    return {make_linear(batched, activation_, inside_, queue()), std::vector<int>(inside_ ? 2 : 1, 0)};
  }

 protected:
  std::vector<mx::array> compose(const std::vector<mx::array>& inputs) const override {
    const auto stream = queue();
    mx::array y = mx::matmul(inputs[0], mx::transpose(inputs[1], stream), stream);
    if (inputs.size() > 2) {
      y = mx::add(y, inputs[2], stream);
    }
    std::vector<mx::array> results{y};
    if (activation_ == Activation::relu) {
      results[0] = mx::maximum(y, mx::array(0.0f, y.dtype()), stream);
    } else if (activation_ == Activation::gelu_approx) {
      results[0] = mx::astype(gelu_approx(mx::astype(y, mx::float32, stream), stream), y.dtype(), stream);
    }
    if (inside_) {
      results.push_back(y);
    }
    return results;
  }

  void encode(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs, mx::cu::CommandEncoder& encoder) override {
    mx::array& out = outputs[0];
    mx::array x = inputs[0];
    mx::array w = inputs[1];
    MatmulProblem problem{
        .dtype = out.dtype(),
        .out_dtype = out.dtype(),
        .rows = static_cast<std::int64_t>(x.size()) / x.shape(-1),
        .columns = w.shape(0),
        .inner = w.shape(1),
        .x_stride = x.shape(-1),
        .w_stride = w.shape(1),
        .out_stride = w.shape(0),
        .has_bias = inputs.size() > 2,
        .keeps_inside = inside_,
        .activation = activation_,
    };
    const auto x_rows = row_distance(x);
    const auto x_leading = x_rows ? leading_dimension(problem.rows, problem.inner, *x_rows, x.strides(-1)) : std::nullopt;
    const auto x_transposed_leading =
        x.ndim() == 2 ? leading_dimension(x.shape(1), x.shape(0), x.strides(1), x.strides(0)) : std::nullopt;
    if (x_leading) {
      problem.x_stride = *x_leading;
    } else if (x_transposed_leading) {
      problem.x_transposed = true;
      problem.x_stride = *x_transposed_leading;
    } else {
      x = contiguous_copy(x, encoder, stream());
    }

    const auto w_leading = leading_dimension(w.shape(0), w.shape(1), w.strides(0), w.strides(1));
    const auto w_transposed_leading = leading_dimension(w.shape(1), w.shape(0), w.strides(1), w.strides(0));
    if (w_leading) {
      problem.w_stride = *w_leading;
    } else if (w_transposed_leading) {
      problem.w_transposed = true;
      problem.w_stride = *w_transposed_leading;
    } else {
      w = contiguous_copy(w, encoder, stream());
    }

    std::optional<mx::array> bias;
    if (problem.has_bias) {
      bias = inputs[2];
      if (bias->size() > 1 && bias->strides(0) != 1) {
        bias = contiguous_copy(*bias, encoder, stream());
      }
    }
    for (mx::array& output : outputs) {
      allocate(output, stream());
    }

    MatmulPointers pointers{
        .x = mx::gpu_ptr<void>(x),
        .w = mx::gpu_ptr<void>(w),
        .out = mx::gpu_ptr<void>(out),
        .bias = bias ? mx::gpu_ptr<void>(*bias) : nullptr,
        .inside = inside_ ? mx::gpu_ptr<void>(outputs[1]) : nullptr,
    };
    auto matmul = prepare_matmul(problem, pointers, encoder, stream());
    const bool separate = !matmul;
    if (separate) {
      // Some shapes and alignments have no algorithm with a fused epilogue: the bare product and a kernel of ours instead.
      problem.has_bias = problem.keeps_inside = false;
      problem.activation = Activation::none;
      pointers.bias = pointers.inside = nullptr;
      matmul = prepare_matmul(problem, pointers, encoder, stream());
    }
    if (!matmul) {
      throw std::runtime_error("[linear] cuBLASLt has no algorithm for this product; please report the shapes and dtype.");
    }
    encoder.set_input_array(x);
    encoder.set_input_array(w);
    if (bias && !separate) {
      encoder.set_input_array(*bias);
    }
    encoder.set_output_array(out);
    if (inside_ && !separate) {
      encoder.set_output_array(outputs[1]);
    }
    encode_matmul(*matmul, encoder);
    if (separate) {
      encode_epilogue(out, inside_ ? &outputs[1] : nullptr, bias, activation_, encoder);
    }
  }

 private:
  // What the slope of the activation is taken at.
  mx::array saved(const std::vector<mx::array>& primals, const std::vector<mx::array>& outputs) const {
    if (activation_ != Activation::gelu_approx) {
      return mx::stop_gradient(outputs[0], queue());  // that of relu does not change with it
    }
    if (!inside_) {
      const auto bias = primals.size() > 2 ? std::optional(primals[2]) : std::nullopt;
      return linear(primals[0], primals[1], bias, Activation::none, queue());
    }
    std::vector<mx::array> inputs = primals;
    inputs.push_back(mx::stop_gradient(outputs[1], queue()));
    return mx::array(outputs[1].shape(), outputs[1].dtype(), std::make_shared<LinearInside>(queue()), std::move(inputs));
  }

  Activation activation_;
  bool inside_;
};

std::vector<mx::array> make_linear(
    const std::vector<mx::array>& inputs, Activation activation, bool inside, const mx::Stream& stream) {
  auto primitive = std::make_shared<Linear>(stream, activation, inside);
  const auto shapes = primitive->output_shapes(inputs);
  const std::vector<mx::Dtype> dtypes(shapes.size(), inputs[0].dtype());
  return mx::array::make_arrays(shapes, dtypes, primitive, inputs);
}

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
  std::vector<mx::array> inputs{x, w};
  if (bias) {
    inputs.push_back(*bias);
  }
  // Perhaps it is differentiated.
  const bool traced = std::any_of(inputs.begin(), inputs.end(), [](const mx::array& in) { return in.is_tracer(); });
  return make_linear(inputs, activation, traced && activation == Activation::gelu_approx, stream)[0];
}

}  // namespace mlx_cuda
