#include "matmul/quantized/dequantize_then_gemm.h"

#include "matmul/dense/cublaslt.h"
#include "matmul/grouped/plan.h"
#include "matmul/grouped/primitive.h"
#include "matmul/grouped/quantized.h"
#include "matmul/quantized/quantized.h"
#include "runtime/memory.h"

#include <mlx/ops.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace mlx_cuda {

namespace {

constexpr std::int64_t kMostValues = std::int64_t{1} << 28;  // of weights that are in the workspace at a time: 512 MiB of 16 bits
constexpr std::int64_t kMostMatrices = 65535;                // of a launch: the height of a grid
constexpr std::int64_t kPartRows = 256;  // a part of a matrix has a multiple of these, so that tiles of products fit

// Values of some rows, or some matrices, of weights: memory that the next part may take over.
mx::array make_values(mx::Shape shape, mx::Dtype dtype, mx::cu::CommandEncoder& encoder, const mx::Stream& stream) {
  mx::array values(std::move(shape), dtype, nullptr, {});
  allocate(values, stream);
  encoder.add_temporary(values);
  return values;
}

// The first `size` matrices, or rows, of values.
mx::array first_of(const mx::array& values, int axis, int size) {
  mx::Shape shape = values.shape();
  shape[axis] = size;
  mx::array part(shape, values.dtype(), nullptr, {});
  part.copy_shared_buffer(values, values.strides(), {true, true, false}, values.data_size());
  return part;
}

// Matrices `first` to `first + size` of a stack.
mx::array some_of(const mx::array& stack, int first, int size) {
  mx::Shape shape = stack.shape();
  shape[0] = size;
  mx::array part(shape, stack.dtype(), nullptr, {});
  const std::int64_t offset = stack.strides(0) * first;
  part.copy_shared_buffer(stack, stack.strides(), {false, false, false}, stack.data_size() - offset, offset);
  return part;
}

// Such that no part has to be copied: that would add nodes in between.
QuantizedWeights dequantizable(const QuantizedWeights& weights, mx::cu::CommandEncoder& encoder, const mx::Stream& stream) {
  return readable(weights, true, piece_alignment(weights.bits), encoder, stream).weights;
}

class DequantizeThenGemm final : public Weighted {
 public:
  DequantizeThenGemm(const mx::Stream& stream, const QuantizedWeights& weights, bool transpose)
      : Weighted(stream, weights, 1, transpose) {}

  const char* name() const override {
    return "DequantizeThenGemm";
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    mx::Shape shape = inputs[0].shape();
    shape.back() = columns(weights(inputs));
    return {shape};
  }

 protected:
  std::vector<mx::array> compose(const std::vector<mx::array>& inputs) const override {
    const mx::array values = values_of(weights(inputs), inputs[0].dtype(), queue());
    return {mx::matmul(inputs[0], transpose_ ? mx::transpose(values, queue()) : values, queue())};
  }

  void encode(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs, mx::cu::CommandEncoder& encoder) override {
    mx::array& out = outputs[0];
    const QuantizedWeights in = dequantizable(weights(inputs), encoder, stream());
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
        .columns = transpose_ ? all : inner,
        .inner = x.shape(-1),
        .x_stride = distance && *distance >= x.shape(-1) ? *distance : x.shape(-1),
        .w_stride = inner,
        .out_stride = transpose_ ? all : inner,
        .w_transposed = !transpose_,
    };
    // Each row of w is a column of the result, so parts of w are products of their own. What is summed over is not divided.
    const std::int64_t most = std::max(kMostValues / inner / kPartRows * kPartRows, kPartRows);
    const auto part = static_cast<int>(transpose_ ? std::min<std::int64_t>(all, most) : all);
    mx::array values = make_values({part, inner}, out.dtype(), encoder, stream());
    for (int first = 0; first < all; first += part) {
      const int rows = std::min(part, all - first);
      mx::array some = first_of(values, 0, rows);
      encode_dequantize(in, first, rows, std::nullopt, some, encoder, stream());
      if (transpose_) {
        problem.columns = rows;
      }
      const MatmulPointers pointers{
          .x = mx::gpu_ptr<void>(x),
          .w = mx::gpu_ptr<void>(some),
          .out = mx::gpu_ptr<char>(out) + (transpose_ ? first : 0) * static_cast<std::int64_t>(out.itemsize()),
      };
      const auto ready = prepare_matmul(problem, pointers, encoder, stream());
      if (!ready) {
        throw std::runtime_error("[quantized_matmul] cuBLASLt has no algorithm for this product.");
      }
      encoder.set_input_array(x);
      encoder.set_input_array(some);
      encoder.set_output_array(some);  // the next part is written after this one has been read
      encoder.set_output_array(out);
      encode_matmul(*ready, encoder);
    }
  }
};

class GroupedQuantized final : public Weighted {
 public:
  GroupedQuantized(const mx::Stream& stream, const QuantizedWeights& weights, bool transpose)
      : Weighted(stream, weights, 2, transpose) {}

  const char* name() const override {
    return "GroupedQuantized";
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    return {{inputs[0].shape(0), columns(weights(inputs))}};
  }

 protected:
  std::vector<mx::array> compose(const std::vector<mx::array>& inputs) const override {
    const mx::array values = values_of(weights(inputs), inputs[0].dtype(), queue());
    return {grouped_matmul(inputs[0], values, inputs[1], transpose_, queue())};
  }

  void encode(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs, mx::cu::CommandEncoder& encoder) override {
    mx::array& out = outputs[0];
    const mx::array x = as_rows(inputs[0], encoder, stream());
    const mx::array offsets = inputs[1].flags().row_contiguous ? inputs[1] : contiguous_copy(inputs[1], encoder, stream());
    if (out.size() == 0) {
      allocate(out, stream());
      return;
    }
    if (transpose_ && can_unpack(weights(inputs))) {
      const Readable in = unpackable(weights(inputs), encoder, stream());
      allocate(out, stream());
      encode_unpacked(x, offsets, in, out, encoder);
      return;
    }
    const QuantizedWeights in = dequantizable(weights(inputs), encoder, stream());
    const int groups = in.w.shape(0);
    const int rows = in.w.shape(1);
    const int inner = in.inner();
    allocate(out, stream());
    const GroupedRows grouped{x, offsets, std::nullopt, true};
    const std::int64_t most = std::clamp<std::int64_t>(kMostValues / (std::int64_t{rows} * inner), 1, kMostMatrices);
    const auto part = static_cast<int>(std::min<std::int64_t>(groups, most));
    mx::array values = make_values({part, rows, inner}, out.dtype(), encoder, stream());
    for (int first = 0; first < groups; first += part) {
      const int size = std::min(part, groups - first);
      mx::array some = first_of(values, 0, size);
      QuantizedWeights those = in;
      those.w = some_of(in.w, first, size);
      those.scales = some_of(in.scales, first, size);
      if (in.biases) {
        those.biases = some_of(*in.biases, first, size);
      }
      mx::array bounds({size + 1}, mx::int32, nullptr, {});
      bounds.copy_shared_buffer(offsets, {1}, {true, true, true}, size + 1, first);
      if (first > 0) {
        encoder.set_input_array(out);  // whose last part has read the values before
      }
      encode_dequantize(those, 0, rows, bounds, some, encoder, stream());
      encode_grouped(grouped, {some, !transpose_}, first, groups, out, encoder);
    }
  }
};

}  // namespace

mx::array dequantize_then_gemm(const mx::array& x, const QuantizedWeights& weights, bool transpose, const mx::Stream& stream) {
  if (!can_copy(x)) {  // the leading dimensions are rows anyway
    const mx::Shape leading(x.shape().begin(), x.shape().end() - 1);
    return mx::unflatten(dequantize_then_gemm(mx::flatten(x, 0, -2, stream), weights, transpose, stream), 0, leading, stream);
  }
  return result_of(std::make_shared<DequantizeThenGemm>(stream, weights, transpose), x.dtype(), {x}, weights);
}

mx::array grouped_quantized(
    const mx::array& x, const QuantizedWeights& weights, const mx::array& offsets, bool transpose, const mx::Stream& stream) {
  return result_of(std::make_shared<GroupedQuantized>(stream, weights, transpose), x.dtype(), {x, offsets}, weights);
}

}  // namespace mlx_cuda
