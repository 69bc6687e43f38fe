#include "matmul/quantized/quantized.h"

#include "matmul/quantized/dequantize_params.h"
#include "matmul/quantized/weights.h"
#include "runtime/device_code.h"
#include "runtime/memory.h"

#include <mlx/backend/cuda/utils.h>
#include <mlx/ops.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

namespace mlx_cuda {

namespace {

KernelModule& kernels() {
  static KernelModule module("dequantize");
  return module;
}

class Dequantize final : public Weighted {
 public:
  Dequantize(const mx::Stream& stream, const QuantizedWeights& weights, mx::Dtype dtype)
      : Weighted(stream, weights, 0, true), dtype_(dtype) {}

  const char* name() const override {
    return "Dequantize";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    return Weighted::is_equivalent(other) && dtype_ == static_cast<const Dequantize&>(other).dtype_;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    mx::Shape shape = inputs[0].shape();
    shape.back() = weights(inputs).inner();
    return {shape};
  }

 protected:
  std::vector<mx::array> compose(const std::vector<mx::array>& inputs) const override {
    return {values_of(weights(inputs), dtype_, queue())};
  }

  void encode(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs, mx::cu::CommandEncoder& encoder) override {
    allocate(outputs[0], stream());
    encode_dequantize(weights(inputs), 0, inputs[0].shape(-2), std::nullopt, outputs[0], encoder, stream());
  }

 private:
  mx::Dtype dtype_;
};

}  // namespace

void encode_dequantize(
    const QuantizedWeights& weights,
    int first,
    int rows,
    const std::optional<mx::array>& offsets,
    mx::array& out,
    mx::cu::CommandEncoder& encoder,
    const mx::Stream& stream) {
  const Readable in = readable(weights, true, piece_alignment(weights.bits), encoder, stream);
  const int inner = weights.inner();

  name_inputs(in.weights, encoder);
  if (offsets) {
    encoder.set_input_array(*offsets);
  }
  encoder.set_output_array(out);
  DequantizeParams params{};
  set_weights(params, in);
  const std::int64_t groups = static_cast<std::int64_t>(first) * in.weights.scales.shape(-1);
  const auto scale_offset = groups * static_cast<std::int64_t>(in.weights.scales.itemsize());
  params.w = static_cast<const char*>(params.w) + first * in.row_bytes;
  params.scales = static_cast<const char*>(params.scales) + scale_offset;
  if (params.biases) {
    params.biases = static_cast<const char*>(params.biases) + scale_offset;
  }
  params.offsets = offsets ? mx::gpu_ptr<int>(*offsets) : nullptr;
  params.out = mx::gpu_ptr<void>(out);
  params.out_distance = static_cast<long long>(rows) * inner;
  params.pieces = params.out_distance / DequantizeParams::kPiece;
  const dim3 grid(divide_up(params.pieces, DequantizeParams::kThreads * DequantizeParams::kPieces), in.weights.matrices());
  encoder.add_kernel_node_ex(
      kernels().function("dequantize_" + format_name(weights) + "_" + type_name(out.dtype())), grid,
      dim3(DequantizeParams::kThreads), dim3(), 0, params);
}

mx::array dequantize(const QuantizedWeights& weights, mx::Dtype dtype, const mx::Stream& stream) {
  return result_of(std::make_shared<Dequantize>(stream, weights, dtype), dtype, {}, weights);
}

}  // namespace mlx_cuda
