#include "matmul/quantized/kernels.h"
#include "matmul/quantized/quantized.h"
#include "runtime/device_code.h"
#include "runtime/kernel_table.h"
#include "runtime/memory.h"
#include "runtime/node.h"

#include <utility>

namespace mlx_cuda {

namespace {

KernelModule kernels("dequantize");
constexpr auto kKernels =
    std::to_array<KernelRow<std::string_view, std::string_view>>({MLX_CUDA_DEQUANTIZE_KERNELS(MLX_CUDA_FORMAT_ROW)});

// Inputs: the weights. Its state has also the dtype of its result.
class Dequantize final : public Stateful<std::pair<WeightedState, mx::Dtype>> {
 public:
  using Stateful::Stateful;
  DEFINE_NAME(Dequantize)

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    mx::Shape shape = inputs[0].shape();
    shape.back() = state_.first.weights(inputs, 0).inner();
    return {shape};
  }

 protected:
  Arrays compose(const Arrays& inputs) const override {
    return {values_of(state_.first.weights(inputs, 0), state_.second, queue())};
  }

  void encode(const Arrays& inputs, Arrays& outputs, CommandEncoder& encoder) override {
    allocate(outputs[0], stream());
    encode_dequantize(state_.first.weights(inputs, 0), std::nullopt, outputs[0], encoder, stream());
  }
};

mx::array part_of(const mx::array& stack, int first, int size) {
  mx::Shape shape = stack.shape();
  shape[0] = size;
  mx::array part(shape, stack.dtype(), nullptr, {});
  const std::int64_t offset = stack.strides(0) * first;
  part.copy_shared_buffer(stack, stack.strides(), {false, false, false}, stack.data_size() - offset, offset);
  return part;
}

Readable readable_pieces(const QuantizedWeights& weights, CommandEncoder& encoder, const mx::Stream& stream) {
  return readable(weights, true, piece_alignment(weights.bits), encoder, stream);
}

}  // namespace

QuantizedWeights dequantizable(const QuantizedWeights& weights, CommandEncoder& encoder, const mx::Stream& stream) {
  return readable_pieces(weights, encoder, stream).weights;
}

QuantizedWeights part_of(const QuantizedWeights& weights, int first, int size) {
  const auto biases = weights.biases ? std::optional(part_of(*weights.biases, first, size)) : std::nullopt;
  return {weights, part_of(weights.w, first, size), part_of(weights.scales, first, size), biases};
}

void encode_dequantize(
    const QuantizedWeights& weights, const MaybeArray& offsets, mx::array& out, CommandEncoder& encoder, const mx::Stream& stream) {
  const Readable in = readable_pieces(weights, encoder, stream);
  KernelNode node(encoder);
  name_inputs(in.weights, encoder);
  DequantizeParams params{};
  set_weights(params, in);
  params.offsets = node.reads<int>(offsets);
  params.out = node.writes(out);
  params.out_distance = static_cast<long long>(weights.w.shape(-2)) * weights.inner();
  params.pieces = params.out_distance / DequantizeParams::kPiece;
  const dim3 grid(divide_up(params.pieces, DequantizeParams::kThreads * DequantizeParams::kPieces), weights.matrices());
  node.launch(
      kernels.function(kernel_for(kKernels, type_name(out.dtype()), format_name(weights))), grid, DequantizeParams::kThreads, 0,
      params);
}

mx::array dequantize(const QuantizedWeights& weights, mx::Dtype dtype, const mx::Stream& stream) {
  return result_of<Dequantize>(inputs_with({}, weights), dtype, stream, std::pair(WeightedState(weights, true), dtype));
}

}  // namespace mlx_cuda
