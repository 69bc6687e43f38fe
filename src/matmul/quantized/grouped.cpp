// Grouped GEMM with quantized weights.
#include "matmul/grouped/params.h"
#include "matmul/grouped/plan.h"
#include "matmul/grouped/primitive.h"
#include "matmul/quantized/kernels.h"
#include "matmul/quantized/quantized.h"
#include "runtime/kernel_table.h"
#include "runtime/lanes.h"
#include "runtime/memory.h"
#include "runtime/node.h"
#include "runtime/tensor_map.h"

#include <mlx/ops.h>

#include <algorithm>

namespace mlx_cuda {

namespace {

KernelModule kernels("grouped_quantized_sm90");
constexpr auto kKernels =
    std::to_array<KernelRow<std::string_view, std::string_view>>({MLX_CUDA_GROUPED_QUANTIZED_KERNELS(MLX_CUDA_FORMAT_ROW)});

// Whether a kernel supports these transposed weights [groups, columns, inner] on this GPU without dequantizing them first, for x
// of 16-bit floats.
bool can_unpack(const QuantizedWeights& weights) {
  return is_hopper() && weights.inner() % GroupedSm90Tile::kDepth == 0;
}

// Adds its node, which writes out [rows, columns]: x [rows, inner] (as from as_rows) times the transposed matrix of each row's
// group. Rows of no group are zeros.
void encode_unpacked(
    const mx::array& x, const mx::array& offsets, const Readable& weights, mx::array& out, CommandEncoder& encoder) {
  const QuantizedWeights& in = weights.weights;
  KernelNode node(encoder);
  GroupedQuantizedParams params{};
  params.rows.offsets = node.reads<int>(offsets);
  params.rows.out = node.writes(out);
  params.rows.has_begin = 1;
  params.rows.groups = params.rows.count = in.w.shape(0);
  params.rows.rows = x.shape(0);
  params.rows.columns = in.w.shape(1);
  params.rows.depth = x.shape(1);
  params.row_bytes = weights.row_bytes;
  params.row_groups = in.scales.shape(-1);
  set_weights(params, weights);
  node.reads(x);
  name_inputs(in, encoder);
  take_lane(encoder);
  constexpr GroupedSm90Tile tile = GroupedQuantizedSm90::kTile;
  node.launch(
      kernels.function(kernel_for(kKernels, type_name(x.dtype()), format_name(in))), multiprocessors(), tile.kThreads,
      GroupedQuantizedSm90::shared_bytes(in.bits), params, matrix_tensor_map(x, tile.kRows), matrix_tensor_map(x, tile.kFewRows));
}

// Values of matrices that are in a workspace at a time at most: 512 MiB of 16 bits.
constexpr std::int64_t kMostValues = std::int64_t{1} << 28;

// Inputs: x, the weights and offsets, int32 [groups + 1].
class GroupedQuantized final : public Stateful<WeightedState> {
 public:
  using Stateful::Stateful;
  DEFINE_NAME(GroupedQuantized)

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    return {{inputs[0].shape(0), state_.columns(inputs)}};
  }

 protected:
  Arrays compose(const Arrays& inputs) const override {
    const mx::array values = values_of(state_.weights(inputs), inputs[0].dtype(), queue());
    return {grouped_matmul(inputs[0], values, inputs.back(), state_.transpose, queue())};
  }

  void encode(const Arrays& inputs, Arrays& outputs, CommandEncoder& encoder) override {
    mx::array& out = outputs[0];
    const mx::array x = as_rows(inputs[0], encoder, stream());
    const mx::array offsets = contiguous(inputs.back(), encoder, stream());
    if (out.size() == 0) {
      allocate(out, stream());
      return;
    }
    if (state_.transpose && can_unpack(state_.weights(inputs))) {
      const Readable in = readable(state_.weights(inputs), false, chunk_alignment(state_.form.bits), encoder, stream());
      allocate(out, stream());
      encode_unpacked(x, offsets, in, out, encoder);
      return;
    }
    const QuantizedWeights in = dequantizable(state_.weights(inputs), encoder, stream());
    const int groups = in.w.shape(0);
    const int rows = in.w.shape(1);
    const int inner = in.inner();
    allocate(out, stream());
    const GroupedRows grouped{x, offsets, std::nullopt, true};
    const std::int64_t most = std::clamp<std::int64_t>(kMostValues / (std::int64_t{rows} * inner), 1, kMostGridRows);
    const auto part = static_cast<int>(std::min<std::int64_t>(groups, most));
    mx::array values = temporary({part, rows, inner}, out.dtype(), encoder, stream());
    for (int first = 0; first < groups; first += part) {
      const int size = std::min(part, groups - first);
      mx::array some = view(values, {size, rows, inner});
      mx::array bounds({size + 1}, mx::int32, nullptr, {});
      bounds.copy_shared_buffer(offsets, {1}, {true, true, true}, size + 1, first);
      if (first > 0) {
        encoder.set_input_array(out);  // whose last part has read the values before
      }
      encode_dequantize(part_of(in, first, size), bounds, some, encoder, stream());
      encode_grouped(grouped, {some, !state_.transpose}, first, groups, out, encoder);
    }
  }
};

}  // namespace

mx::array grouped_quantized(
    const mx::array& x, const QuantizedWeights& weights, const mx::array& offsets, bool transpose, const mx::Stream& stream) {
  return result_of<GroupedQuantized>(inputs_with({x}, weights, offsets), x.dtype(), stream, WeightedState(weights, transpose));
}

}  // namespace mlx_cuda
