#include "matmul/dense/linear.h"

#include "matmul/dense/epilogue.h"
#include "matmul/dense/gradient.h"
#include "runtime/node.h"
#include "runtime/status.h"

#include <mlx/ops.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>

namespace mlx_cuda {

namespace {

// A matrix as cuBLASLt reads it, row-major or transposed.
struct Operand {
  mx::array array;
  std::int64_t stride;  // between rows in memory
  bool transposed;
};

// The leading dimension of a matrix that is row-major with any row stride; none if it is not, or if rows overlap.
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

// [..., columns] as a matrix. It is copied if it is neither.
Operand operand(const mx::array& in, CommandEncoder& encoder, const mx::Stream& stream) {
  const int columns = in.shape(-1);
  const std::int64_t rows = static_cast<std::int64_t>(in.size()) / columns;
  const auto distance = row_distance(in);
  if (const auto leading = distance ? leading_dimension(rows, columns, *distance, in.strides(-1)) : std::nullopt) {
    return {in, *leading, false};
  }
  if (const auto leading = in.ndim() == 2 ? leading_dimension(columns, rows, in.strides(1), in.strides(0)) : std::nullopt) {
    return {in, *leading, true};
  }
  return {contiguous_copy(in, encoder, stream), columns, false};
}

// In float32, because x^3 and its gradient overflow float16 from |x| = 40 on.
mx::array gelu_approx(const mx::array& x, const mx::Stream& stream) {
  auto constant = [](double value) { return mx::array(static_cast<float>(value)); };
  const auto cube = mx::multiply(mx::square(x, stream), x, stream);
  const auto sum = mx::add(x, mx::multiply(constant(0.044715), cube, stream), stream);
  const auto inside = mx::multiply(constant(std::sqrt(2 / std::numbers::pi)), sum, stream);
  const auto gate = mx::add(constant(1), mx::tanh(inside, stream), stream);
  return mx::multiply(mx::multiply(constant(0.5), x, stream), gate, stream);
}

// The tensor that a forward pass has saved, as a function of the layer's inputs: for Linear's gradients it is constant, so that
// first-order gradients add nothing for it. Inputs: those of Linear and the saved tensor, which is the result.
class LinearInside final : public Fused {
 public:
  using Fused::Fused;
  DEFINE_NAME(LinearInside)
  DEFINE_DEFAULT_IS_EQUIVALENT()

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    return {inputs.back().shape()};
  }

 protected:
  Arrays compose(const Arrays& inputs) const override {
    const auto bias = inputs.size() > 3 ? std::optional(inputs[2]) : std::nullopt;
    return {linear(inputs[0], inputs[1], bias, Activation::none, queue())};
  }

  void encode(const Arrays& inputs, Arrays& outputs, CommandEncoder&) override {
    outputs[0].copy_shared_buffer(inputs.back());
  }
};

struct LinearOptions {
  Activation activation;
  bool inside;

  bool operator==(const LinearOptions&) const = default;
};

// Inputs: x, w and perhaps the bias. Outputs: the layer's result and, with `inside`, the argument of gelu_approx, which its
// gradient needs: saving it is cheap, and computing it again would need a GEMM.
class Linear final : public Stateful<LinearOptions> {
 public:
  using Stateful::Stateful;
  DEFINE_NAME(Linear)

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    mx::Shape shape = inputs[0].shape();
    shape.back() = inputs[1].shape(0);
    return std::vector<mx::Shape>(state_.inside ? 2 : 1, shape);
  }

  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums, const Arrays& outputs) override {
    const auto stream = queue();
    const mx::array& x = primals[0];
    const mx::array& w = primals[1];
    const bool bias_wanted = std::find(argnums.begin(), argnums.end(), 2) != argnums.end();
    const LinearGradient gradient = linear_gradient(cotangents[0], saved(primals, outputs), state_.activation, bias_wanted, stream);
    Arrays wanted;
    for (const int argnum : argnums) {
      if (argnum == 0) {
        wanted.push_back(linear(gradient.inner, mx::transpose(w, stream), std::nullopt, Activation::none, stream));
      } else if (argnum == 1) {
        const mx::array columns = mx::transpose(as_matrix(gradient.inner, stream), stream);
        wanted.push_back(linear(columns, mx::transpose(as_matrix(x, stream), stream), std::nullopt, Activation::none, stream));
      } else {
        wanted.push_back(*gradient.bias);
      }
    }
    return wanted;
  }

  // A batch of x only is more rows.
  std::pair<Arrays, std::vector<int>> vmap(const Arrays& inputs, const std::vector<int>& axes) override {
    if (std::any_of(axes.begin() + 1, axes.end(), [](int axis) { return axis >= 0; })) {
      return Fused::vmap(inputs, axes);
    }
    Arrays batched = inputs;
    batched[0] = mx::moveaxis(inputs[0], axes[0], 0, queue());
    return {results_of<Linear>(batched, inputs[0].dtype(), queue(), state_), std::vector<int>(state_.inside ? 2 : 1, 0)};
  }

 protected:
  Arrays compose(const Arrays& inputs) const override {
    const auto stream = queue();
    mx::array y = mx::matmul(inputs[0], mx::transpose(inputs[1], stream), stream);
    if (inputs.size() > 2) {
      y = mx::add(y, inputs[2], stream);
    }
    Arrays results{y};
    if (state_.activation == Activation::relu) {
      results[0] = mx::maximum(y, mx::array(0.0f, y.dtype()), stream);
    } else if (state_.activation == Activation::gelu_approx) {
      results[0] = mx::astype(gelu_approx(mx::astype(y, mx::float32, stream), stream), y.dtype(), stream);
    }
    if (state_.inside) {
      results.push_back(y);
    }
    return results;
  }

  void encode(const Arrays& inputs, Arrays& outputs, CommandEncoder& encoder) override {
    mx::array& out = outputs[0];
    const Operand x = operand(inputs[0], encoder, stream());
    const Operand w = operand(inputs[1], encoder, stream());
    const auto bias = inputs.size() > 2 ? std::optional(with_adjacent_elements(inputs[2], encoder, stream())) : std::nullopt;
    MatmulProblem problem{
        .dtype = out.dtype(),
        .out_dtype = out.dtype(),
        .rows = static_cast<std::int64_t>(inputs[0].size()) / inputs[0].shape(-1),
        .columns = inputs[1].shape(0),
        .inner = inputs[1].shape(1),
        .x_stride = x.stride,
        .w_stride = w.stride,
        .out_stride = inputs[1].shape(0),
        .x_transposed = x.transposed,
        .w_transposed = w.transposed,
        .has_bias = bias.has_value(),
        .keeps_inside = state_.inside,
        .activation = state_.activation,
    };
    for (mx::array& output : outputs) {
      allocate(output, stream());
    }

    MatmulPointers pointers{
        .x = mx::gpu_ptr<void>(x.array),
        .w = mx::gpu_ptr<void>(w.array),
        .out = mx::gpu_ptr<void>(out),
        .bias = bias ? mx::gpu_ptr<void>(*bias) : nullptr,
        .inside = state_.inside ? mx::gpu_ptr<void>(outputs[1]) : nullptr,
    };
    auto matmul = prepare_matmul(problem, pointers, encoder, stream());
    const bool separate = !matmul;
    if (separate) {
      // Some shapes and alignments have no algorithm with a fused epilogue: a plain GEMM and mlx-cuda's epilogue kernel instead.
      problem.has_bias = problem.keeps_inside = false;
      problem.activation = Activation::none;
      pointers.bias = pointers.inside = nullptr;
      matmul = prepare_matmul(problem, pointers, encoder, stream());
    }
    if (!matmul) {
      throw Unavailable("[linear] cuBLASLt has no algorithm for this GEMM.");
    }
    KernelNode node(encoder);
    node.reads(x.array);
    node.reads(w.array);
    if (bias && !separate) {
      node.reads(*bias);
    }
    node.writes(out);
    if (state_.inside && !separate) {
      node.writes(outputs[1]);
    }
    encode_matmul(*matmul, encoder);
    if (separate) {
      encode_epilogue(out, state_.inside ? &outputs[1] : nullptr, bias, state_.activation, encoder);
    }
  }

 private:
  // The tensor at which the activation's gradient is evaluated.
  mx::array saved(const Arrays& primals, const Arrays& outputs) const {
    if (state_.activation != Activation::gelu_approx) {
      return mx::stop_gradient(outputs[0], queue());  // that of relu does not change with it
    }
    if (!state_.inside) {
      const auto bias = primals.size() > 2 ? std::optional(primals[2]) : std::nullopt;
      return linear(primals[0], primals[1], bias, Activation::none, queue());
    }
    Arrays inputs = primals;
    inputs.push_back(mx::stop_gradient(outputs[1], queue()));
    return result_of<LinearInside>(std::move(inputs), outputs[1].dtype(), queue());
  }
};

}  // namespace

mx::array linear(const mx::array& x, const mx::array& w, const MaybeArray& bias, Activation activation, const mx::Stream& stream) {
  if (!can_copy(x)) {  // the leading dimensions are rows anyway
    const mx::array rows = linear(mx::flatten(x, 0, -2, stream), w, bias, activation, stream);
    mx::Shape leading(x.shape().begin(), x.shape().end() - 1);
    return mx::unflatten(rows, 0, leading, stream);
  }
  const Arrays inputs = joined({x, w}, bias);
  // Perhaps it is differentiated.
  const bool traced = std::any_of(inputs.begin(), inputs.end(), [](const mx::array& in) { return in.is_tracer(); });
  const bool inside = traced && activation == Activation::gelu_approx;
  return results_of<Linear>(inputs, x.dtype(), stream, LinearOptions{activation, inside})[0];
}

}  // namespace mlx_cuda
