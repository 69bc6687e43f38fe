#include "matmul/dense/cublaslt.h"
#include "matmul/quantized/quantized.h"
#include "runtime/device_code.h"
#include "runtime/memory.h"
#include "runtime/node.h"
#include "runtime/status.h"

#include <mlx/ops.h>

#include <algorithm>

namespace mlx_cuda {

namespace {

// Bytes of dequantized weights per tile.
std::int64_t most_bytes() {
  constexpr std::int64_t most = std::int64_t{128} << 20;
  constexpr std::int64_t share = 256;  // of the GPU's memory
  return std::min(most, device_memory() / share);
}

constexpr std::int64_t kPartRows = 256;  // a tile's number of rows is a multiple of this, for the tiles of the GEMM

// Inputs: x and the weights.
class DequantizeThenGemm final : public Stateful<WeightedState> {
 public:
  using Stateful::Stateful;
  DEFINE_NAME(DequantizeThenGemm)

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    mx::Shape shape = inputs[0].shape();
    shape.back() = state_.columns(inputs);
    return {shape};
  }

 protected:
  Arrays compose(const Arrays& inputs) const override {
    const mx::array values = values_of(state_.weights(inputs), inputs[0].dtype(), queue());
    return {mx::matmul(inputs[0], state_.transpose ? mx::transpose(values, queue()) : values, queue())};
  }

  void encode(const Arrays& inputs, Arrays& outputs, CommandEncoder& encoder) override {
    mx::array& out = outputs[0];
    const bool transpose = state_.transpose;
    const QuantizedWeights in = dequantizable(state_.weights(inputs), encoder, stream());
    const int inner = in.inner();
    const int all = in.w.shape(0);
    mx::array x = inputs[0];
    const auto distance = row_distance(x);
    // cuBLASLt takes rows in order that do not overlap.
    if (!distance || *distance < x.shape(-1)) {
      x = contiguous_copy(x, encoder, stream());
    }
    allocate(out, stream());

    MatmulProblem problem{
        .dtype = out.dtype(),
        .out_dtype = out.dtype(),
        .rows = static_cast<std::int64_t>(x.size()) / x.shape(-1),
        .columns = transpose ? all : inner,
        .inner = x.shape(-1),
        .x_stride = distance && *distance >= x.shape(-1) ? *distance : x.shape(-1),
        .w_stride = inner,
        .out_stride = transpose ? all : inner,
        .w_transposed = !transpose,
    };
    // Each row of w is a column of the result, so tiles of w are separate GEMMs. K is not split.
    const std::int64_t row_bytes = std::int64_t{inner} * static_cast<std::int64_t>(out.itemsize());
    const std::int64_t most = std::max(most_bytes() / row_bytes / kPartRows * kPartRows, kPartRows);
    const auto part = static_cast<int>(transpose ? std::min<std::int64_t>(all, most) : all);
    mx::array values = temporary_in_turn({part, inner}, out.dtype(), encoder, stream());
    for (int first = 0; first < all; first += part) {
      const int rows = std::min(part, all - first);
      mx::array some = view(values, {rows, inner});
      encode_dequantize(part_of(in, first, rows), std::nullopt, some, encoder, stream());
      if (transpose) {
        problem.columns = rows;
      }
      const MatmulPointers pointers{
          .x = mx::gpu_ptr<void>(x),
          .w = mx::gpu_ptr<void>(some),
          .out = mx::gpu_ptr<char>(out) + (transpose ? first : 0) * static_cast<std::int64_t>(out.itemsize()),
      };
      const auto ready = prepare_matmul(problem, pointers, encoder, stream());
      if (!ready) {
        throw Unavailable("[quantized_matmul] cuBLASLt has no algorithm for this GEMM.");
      }
      KernelNode node(encoder);
      node.reads(x);
      node.reads(some);
      node.writes(some);  // the next part is written after this one has been read
      node.writes(out);
      encode_matmul(*ready, encoder);
    }
  }
};

}  // namespace

mx::array dequantize_then_gemm(const mx::array& x, const QuantizedWeights& weights, bool transpose, const mx::Stream& stream) {
  if (!can_copy(x)) {  // the leading dimensions are rows anyway
    const mx::Shape leading(x.shape().begin(), x.shape().end() - 1);
    return mx::unflatten(dequantize_then_gemm(mx::flatten(x, 0, -2, stream), weights, transpose, stream), 0, leading, stream);
  }
  return result_of<DequantizeThenGemm>(inputs_with({x}, weights), x.dtype(), stream, WeightedState(weights, transpose));
}

}  // namespace mlx_cuda
