#include "matmul/grouped/quantized.h"

#include "matmul/grouped/params.h"
#include "runtime/device_code.h"
#include "runtime/lanes.h"
#include "runtime/node.h"
#include "runtime/tensor_map.h"

#include <string>

namespace mlx_cuda {

namespace {

KernelModule kernels("grouped_quantized_sm90");

}  // namespace

bool can_unpack(const QuantizedWeights& weights) {
  return is_hopper() && weights.inner() % GroupedSm90Tile::kDepth == 0;
}

Readable unpackable(const QuantizedWeights& weights, mx::cu::CommandEncoder& encoder, const mx::Stream& stream) {
  return readable(weights, false, GroupedQuantizedSm90::vector_bytes(weights.bits), encoder, stream);
}

void encode_unpacked(
    const mx::array& x, const mx::array& offsets, const Readable& weights, mx::array& out, mx::cu::CommandEncoder& encoder) {
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
      kernels.function("grouped_" + format_name(in) + "_" + type_name(x.dtype())), multiprocessors(), tile.kThreads,
      GroupedQuantizedSm90::shared_bytes(in.bits), params, matrix_tensor_map(x, tile.kRows), matrix_tensor_map(x, tile.kFewRows));
}

}  // namespace mlx_cuda
