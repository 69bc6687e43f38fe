#include "matmul/quantized/kernels.h"
#include "matmul/quantized/sm90_params.h"
#include "runtime/device_code.h"
#include "runtime/lanes.h"
#include "runtime/memory.h"

namespace mlx_cuda {

namespace {

// Times in those of one range of a block.
constexpr double kStart = 5;              // of each block
constexpr double kMerge = 3;              // of adding the splits' sums
constexpr double kMergedResults = 1.0e6;  // that take one more

KernelModule& kernels() {
  static KernelModule module("quantized_sm90");
  return module;
}

// Ranges of inner for each block, so that the last of all blocks is done soonest.
int ranges_of_a_block(std::int64_t blocks, int ranges, std::int64_t results) {
  int best = ranges;
  double least = 0;
  for (int splits = 1; splits <= ranges; ++splits) {
    const int share = divide_up(ranges, splits);
    if (splits > 1 && share == divide_up(ranges, splits - 1)) {
      continue;
    }
    const double merge = splits == 1 ? 0 : kMerge + static_cast<double>(results * splits) / kMergedResults;
    const double time = divide_up(blocks * splits, multiprocessors()) * (share + kStart) + merge;
    if (splits == 1 || time < least) {
      least = time;
      best = share;
    }
  }
  return best;
}

}  // namespace

void encode_sm90(const SkinnyCall& call) {
  const auto& [kernel, x, in, lhs, rhs, out, transpose, rows, products, encoder, stream] = call;
  const QuantizedSm90 shape{kernel.tile};
  QuantizedSm90Params params{};
  call.describe(params);
  params.block_rows = shape.block_rows;
  params.row_blocks = divide_up(rows, shape.block_rows);
  const int tiles = divide_up(params.columns, QuantizedSm90::kTileRows);
  const std::int64_t blocks = static_cast<std::int64_t>(tiles) * params.row_blocks * products;
  const int ranges = divide_up(params.inner, QuantizedSm90::kRange);
  params.range = ranges_of_a_block(blocks, ranges, static_cast<std::int64_t>(out.size())) * QuantizedSm90::kRange;
  params.splits = divide_up(params.inner, params.range);

  const int eights = divide_up(rows, 8);
  const int parts = divide_up(params.inner, QuantizedSm90::kPart);
  params.ordered =
      workspace(static_cast<std::size_t>(products) * eights * 8 * parts * QuantizedSm90::kPart * x.itemsize(), encoder, stream);
  if (params.splits > 1) {
    params.results = static_cast<int>(blocks);
    const std::size_t size = static_cast<std::size_t>(blocks) * params.splits * shape.block_rows * QuantizedSm90::kTileRows;
    params.partial = static_cast<float*>(workspace(size * sizeof(float), encoder, stream));
    params.arrived = static_cast<unsigned*>(workspace(params.results * sizeof(unsigned), encoder, stream));
  }

  encoder.set_input_array(x);
  if (lhs) {
    encoder.set_input_array(*lhs);
  }
  encoder.set_output_array(out);  // stands for the workspaces, which are no arrays
  encoder.add_kernel_node_ex(
      kernels().function("quantized_sm90_order_" + format_name(in.weights)),
      dim3(divide_up(static_cast<std::int64_t>(parts) * eights, QuantizedSm90::kOrderWarps), products),
      dim3(QuantizedSm90::kOrderWarps * 32), dim3(), 0, params);

  encoder.set_input_array(out);
  name_inputs(in.weights, encoder);
  if (rhs) {
    encoder.set_input_array(*rhs);
  }
  encoder.set_output_array(out);
  take_lane(encoder);
  encoder.add_kernel_node_ex(
      kernels().function(kernel.name), dim3(tiles, params.splits * params.row_blocks, products), dim3(QuantizedSm90::kThreads),
      dim3(), static_cast<unsigned>(shape.shared_bytes(in.weights.bits)), params);
}

}  // namespace mlx_cuda
