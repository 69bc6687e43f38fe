#include "matmul/dense/cublaslt.h"
#include "matmul/dense/epilogue.h"
#include "matmul/dense/linear.h"
#include "matmul/fp8/fp8.h"
#include "matmul/fp8/params.h"
#include "runtime/node.h"
#include "runtime/status.h"

#include <mlx/ops.h>

#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

namespace mlx_cuda {

namespace {

constexpr int kBlock = Fp8Shape::kBlock;
constexpr int kUnit = 16;  // cuBLASLt takes FP8 rows of a multiple of 16 bytes

int round_up(int value, int step) {
  return ceil_div(value, step) * step;
}

// The array with zeros at the end of an axis.
mx::array padded(const mx::array& in, int axis, int size, const mx::Stream& s) {
  const int missing = size - in.shape(axis);
  return missing == 0 ? in : mx::pad(in, {axis}, {0}, {missing}, mx::zeros({}, in.dtype(), s), "constant", s);
}

// The scales of one operand [rows, columns], as a matrix of their own.
class Scales {
 public:
  Scales(const MaybeArray& scale, int rows, int columns, const mx::Stream& s)
      : rows_(rows), blocks_(ceil_div(columns, kBlock)), s_(s) {
    if (!scale) {
      return;
    }
    if (scale->size() == 1) {
      array_ = mx::reshape(*scale, {1, 1}, s);
      return;
    }
    const int last = scale->shape(-1);
    array_ = scale->ndim() == 2 ? *scale : mx::reshape(*scale, {-1, last}, s);
    scaling_ = array_->shape(0) != rows ? Scaling::tiles : last == 1 ? Scaling::rows : Scaling::blocks;
  }

  Scaling scaling() const {
    return scaling_;
  }

  // The same numbers in another scaling's shape, which repeats them; `to` is no coarser.
  void widen(Scaling to) {
    if (to == scaling_) {
      return;
    }
    if (!array_) {
      array_ = mx::ones({1, 1}, mx::float32, s_);
    } else if (scaling_ == Scaling::tiles) {
      array_ = of_rows();
    }
    scaling_ = to;
    const int height = to == Scaling::tiles ? ceil_div(rows_, kBlock) : rows_;
    array_ = mx::broadcast_to(*array_, {height, to == Scaling::rows ? 1 : blocks_}, s_);
  }

  // One for each element, broadcasting with [rows, columns].
  mx::array spread(int columns) const {
    if (!array_) {
      return mx::array(1.0f);
    }
    mx::array all = scaling_ == Scaling::tiles ? of_rows() : *array_;
    if (scaling_ == Scaling::blocks || scaling_ == Scaling::tiles) {
      all = mx::slice(mx::repeat(all, kBlock, 1, s_), {0, 0}, {rows_, columns}, s_);
    }
    return all;
  }

  // As cuBLASLt reads them for an operand of `height` rows, of which the last ones are padding; none where all are 1.
  MaybeArray laid_out(int height) const {
    if (!array_) {
      return std::nullopt;
    }
    mx::array out = *array_;
    if (scaling_ == Scaling::rows || scaling_ == Scaling::blocks) {
      out = padded(out, 0, height, s_);
    }
    if (scaling_ == Scaling::blocks) {
      out = mx::transpose(out, s_);
    } else if (scaling_ == Scaling::tiles) {
      out = padded(out, 1, round_up(blocks_, 4), s_);
    }
    return mx::contiguous(out, false, s_);
  }

 private:
  // Those of tiles, repeated for each row.
  mx::array of_rows() const {
    return mx::slice(mx::repeat(*array_, kBlock, 0, s_), {0, 0}, {rows_, blocks_}, s_);
  }

  int rows_, blocks_;
  mx::Stream s_;
  MaybeArray array_;
  Scaling scaling_ = Scaling::tensor;
};

struct Fp8Options {
  mx::Dtype out_dtype;
  Scaling scaling_a, scaling_b;
  bool has_scale_a, has_scale_b, has_bias;

  bool operator==(const Fp8Options&) const = default;
};

MatmulProblem make_problem(std::int64_t rows, std::int64_t columns, std::int64_t inner, const Fp8Options& options) {
  return {
      .dtype = mx::uint8,
      .out_dtype = options.out_dtype,
      .rows = rows,
      .columns = columns,
      .inner = inner,
      .x_stride = inner,
      .w_stride = inner,
      .out_stride = columns,
      .x_scaling = options.scaling_a,
      .w_scaling = options.scaling_b,
  };
}

// Inputs: a [M, K] and b [N, K] of sizes that cuBLASLt takes, the scales as it reads them, the bias [N] in the result's dtype.
class Fp8Matmul final : public Stateful<Fp8Options> {
 public:
  using Stateful::Stateful;
  DEFINE_NAME(Fp8Matmul)

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    return {{inputs[0].shape(0), inputs[1].shape(0)}};
  }

  std::pair<Arrays, std::vector<int>> vmap(const Arrays& inputs, const std::vector<int>& axes) override {
    const auto apply = [&](const Arrays& one) { return result_of<Fp8Matmul>(one, state_.out_dtype, queue(), state_); };
    return vmap_in_turn(inputs, axes, apply, queue());
  }

 protected:
  bool is_composable() const override {
    return false;
  }

  // Called only for gradients, for which all inputs except the bias are constants.
  Arrays compose(const Arrays& inputs) const override {
    if (!state_.has_bias) {
      throw std::runtime_error("[fp8_matmul] FP8 operands have no gradients.");
    }
    return {mx::broadcast_to(inputs.back(), {inputs[0].shape(0), inputs[1].shape(0)}, queue())};
  }

  void encode(const Arrays& inputs, Arrays& outputs, CommandEncoder& encoder) override {
    mx::array& out = outputs[0];
    // The library wants scales on 16 bytes too, be they one number.
    auto operand = [&](const auto& in) { return contiguous_on_16_bytes(in, encoder, stream()); };
    const mx::array a = operand(inputs[0]);
    const mx::array b = operand(inputs[1]);
    Extras extras = this->extras(inputs);
    for (auto* extra : {&extras.scale_a, &extras.scale_b, &extras.bias}) {
      *extra = operand(*extra);
    }
    allocate(out, stream());

    auto data = [](const MaybeArray& in) { return in ? mx::gpu_ptr<void>(*in) : nullptr; };
    MatmulProblem problem = make_problem(a.shape(0), b.shape(0), a.shape(1), state_);
    // The library wants a bfloat16 bias for a float32 result.
    problem.has_bias = extras.bias && state_.out_dtype != mx::float32;
    MatmulPointers pointers{
        .x = mx::gpu_ptr<void>(a),
        .w = mx::gpu_ptr<void>(b),
        .out = mx::gpu_ptr<void>(out),
        .bias = problem.has_bias ? data(extras.bias) : nullptr,
        .x_scale = data(extras.scale_a),
        .w_scale = data(extras.scale_b),
    };
    auto matmul = prepare_matmul(problem, pointers, encoder, stream());
    bool bias_later = extras.bias && !problem.has_bias;
    if (!matmul && problem.has_bias) {  // no scaling by blocks goes with a bias
      problem.has_bias = false;
      pointers.bias = nullptr;
      bias_later = true;
      matmul = prepare_matmul(problem, pointers, encoder, stream());
    }
    if (!matmul) {
      scale_later(problem, pointers, a, b, extras, out, encoder);
      return;
    }
    name_arrays(a, b, extras, out, encoder);
    encode_matmul(*matmul, encoder);
    if (bias_later) {
      encode_epilogue(out, nullptr, extras.bias, Activation::none, encoder);
    }
  }

 private:
  struct Extras {
    MaybeArray scale_a, scale_b, bias;
  };

  Extras extras(const Arrays& inputs) const {
    std::size_t next = 2;
    auto take = [&](bool given) { return given ? std::optional(inputs[next++]) : std::nullopt; };
    return {take(state_.has_scale_a), take(state_.has_scale_b), take(state_.has_bias)};
  }

  // Of the node that comes next.
  static void name_arrays(const mx::array& a, const mx::array& b, const Extras& extras, mx::array& out, CommandEncoder& encoder) {
    KernelNode node(encoder);
    node.reads(a);
    node.reads(b);
    node.reads(extras.scale_a);
    node.reads(extras.scale_b);
    node.reads(extras.bias);
    node.writes(out);
  }

  // A GEMM without scales in float32, and a kernel that applies them: for libraries without scales by row.
  void scale_later(
      MatmulProblem problem,
      MatmulPointers pointers,
      const mx::array& a,
      const mx::array& b,
      const Extras& extras,
      mx::array& out,
      CommandEncoder& encoder) {
    void* gemm = workspace(out.size() * sizeof(float), encoder, stream());
    problem.out_dtype = mx::float32;
    problem.x_scaling = problem.w_scaling = Scaling::tensor;
    pointers.out = gemm;
    pointers.x_scale = pointers.w_scale = nullptr;
    const auto matmul = prepare_matmul(problem, pointers, encoder, stream());
    if (!matmul) {
      throw Unavailable("[fp8_matmul] cuBLASLt has no algorithm for this GEMM.");
    }
    name_arrays(a, b, extras, out, encoder);
    encode_matmul(*matmul, encoder);
    encode_scaling(gemm, out, extras.scale_a, extras.scale_b, extras.bias, encoder);
  }
};

// Scalings that cuBLASLt knows together: both for tensors, both by rows, blocks by blocks or by tiles.
void match(Scales& a, Scales& b) {
  auto fine = [](const Scales& scales) { return scales.scaling() == Scaling::blocks || scales.scaling() == Scaling::tiles; };
  if (fine(a) || fine(b)) {
    a.widen(Scaling::blocks);
    b.widen(b.scaling() == Scaling::tensor || b.scaling() == Scaling::tiles ? Scaling::tiles : Scaling::blocks);
  } else if (a.scaling() != b.scaling()) {
    a.widen(Scaling::rows);
    b.widen(Scaling::rows);
  }
}

// For a library that has no GEMM scaled by blocks: the scaled numbers in the dtype that the GEMM is computed in.
mx::array dequantized_matmul(
    const mx::array& a,
    const mx::array& b,
    const Scales& scale_a,
    const Scales& scale_b,
    const MaybeArray& bias,
    mx::Dtype out_dtype,
    const mx::Stream& s) {
  const mx::Dtype dtype = out_dtype == mx::bfloat16 ? mx::bfloat16 : mx::float32;  // scales may leave the range of float16
  auto wide = [&](const mx::array& in, const Scales& scales) {
    return mx::astype(mx::multiply(mx::from_fp8(in, mx::float32, s), scales.spread(in.shape(1)), s), dtype, s);
  };
  const auto wide_bias = bias ? std::optional(mx::astype(*bias, dtype, s)) : std::nullopt;
  return mx::astype(linear(wide(a, scale_a), wide(b, scale_b), wide_bias, Activation::none, s), out_dtype, s);
}

}  // namespace

mx::array fp8_matmul(
    const mx::array& a,
    const mx::array& b,
    const MaybeArray& scale_a,
    const MaybeArray& scale_b,
    const MaybeArray& bias,
    mx::Dtype out_dtype,
    const mx::Stream& stream) {
  auto constant = [&](const MaybeArray& in) { return in && in->is_tracer() ? std::optional(mx::stop_gradient(*in, stream)) : in; };
  mx::Shape shape = a.shape();
  shape.back() = b.shape(0);
  const mx::array rows_a = a.ndim() == 2 ? a : mx::reshape(a, {-1, a.shape(-1)}, stream);
  const int rows = rows_a.shape(0);
  const int columns = b.shape(0);
  const int inner = round_up(b.shape(1), kUnit);
  Scales scales_a(constant(scale_a), rows, b.shape(1), stream);
  Scales scales_b(constant(scale_b), columns, b.shape(1), stream);
  match(scales_a, scales_b);
  const bool blocks = scales_a.scaling() == Scaling::blocks;
  const int height = blocks ? round_up(rows, 4) : rows;
  const int width = round_up(columns, kUnit);

  Fp8Options options{
      .out_dtype = out_dtype,
      .scaling_a = scales_a.scaling(),
      .scaling_b = scales_b.scaling(),
      .has_scale_a = false,
      .has_scale_b = false,
      .has_bias = bias.has_value(),
  };
  auto& device = mx::cu::device(stream.device);
  device.make_current();
  if (blocks && !can_matmul(make_problem(height, width, inner, options), device)) {
    return mx::reshape(dequantized_matmul(rows_a, b, scales_a, scales_b, bias, out_dtype, stream), shape, stream);
  }
  const auto of_a = scales_a.laid_out(height);
  const auto of_b = scales_b.laid_out(width);
  options.has_scale_a = of_a.has_value();
  options.has_scale_b = of_b.has_value();
  const auto added = bias ? std::optional(padded(mx::astype(*bias, out_dtype, stream), 0, width, stream)) : std::nullopt;
  const mx::array padded_a = padded(padded(rows_a, 1, inner, stream), 0, height, stream);
  const mx::array padded_b = padded(padded(b, 1, inner, stream), 0, width, stream);
  mx::array out = result_of<Fp8Matmul>(joined({padded_a, padded_b}, of_a, of_b, added), out_dtype, stream, options);
  if (height != rows || width != columns) {
    out = mx::slice(out, {0, 0}, {rows, columns}, stream);
  }
  return a.ndim() == 2 ? out : mx::reshape(out, shape, stream);
}

}  // namespace mlx_cuda
