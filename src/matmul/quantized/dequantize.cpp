#include "matmul/quantized/quantized.h"

#include "matmul/quantized/params.h"
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

constexpr int kPiece = 8;      // values that a thread takes at once
constexpr int kThreads = 256;  // of a block
constexpr int kPieces = 2;     // of a thread

KernelModule& kernels() {
  static KernelModule module("dequantize");
  return module;
}

class Dequantize final : public Weighted {
 public:
  Dequantize(const mx::Stream& stream, const QuantizedWeights& weights, mx::Dtype dtype)
      : Weighted(stream, weights), dtype_(dtype) {}

  const char* name() const override {
    return "Dequantize";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    return Weighted::is_equivalent(other) && dtype_ == static_cast<const Dequantize&>(other).dtype_;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    mx::Shape shape = inputs[0].shape();
    shape.back() = weights(inputs, 0).inner();
    return {shape};
  }

 protected:
  std::vector<mx::array> compose(const std::vector<mx::array>& inputs) const override {
    return {values_of(weights(inputs, 0), dtype_, queue())};
  }

  void encode(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs, mx::cu::CommandEncoder& encoder) override {
    allocate(outputs[0], stream());
    encode_dequantize(weights(inputs, 0), 0, inputs[0].shape(-2), std::nullopt, outputs[0], encoder, stream());
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
  const Readable in = readable(weights, true, weights.bits == 8 ? 8 : 4, encoder, stream);
  const mx::array& w = in.weights.w;
  const int inner = weights.inner();
  const auto matrices = static_cast<unsigned>(w.size() / w.shape(-1) / w.shape(-2));
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
  params.pieces = params.out_distance / kPiece;
  const dim3 grid(divide_up(params.pieces, kThreads * kPieces), matrices);
  encoder.add_kernel_node_ex(
      kernels().function("dequantize_" + format_name(weights) + "_" + type_name(out.dtype())), grid, dim3(kThreads), dim3(), 0,
      params);
}

mx::array dequantize(const QuantizedWeights& weights, mx::Dtype dtype, const mx::Stream& stream) {
  std::vector<mx::array> inputs;
  append_inputs(inputs, weights);
  auto primitive = std::make_shared<Dequantize>(stream, weights, dtype);
  mx::Shape shape = primitive->output_shapes(inputs)[0];
  return mx::array(std::move(shape), dtype, std::move(primitive), std::move(inputs));
}

}  // namespace mlx_cuda
