#include "matmul/quantized/sm90.h"

#include "matmul/quantized/sm90_params.h"
#include "runtime/device_code.h"
#include "runtime/lanes.h"
#include "runtime/memory.h"

#include <cstdint>
#include <string>

namespace mlx_cuda {

namespace {

// With fewer rows, putting x in order costs what the products gain: 16 rows take 20 to 29 us in either kernel with 4 and 8 bits
// (14336 x 4096), and 3 and 6 bits 26 and 29 us here, 27 and 35 in the other.
constexpr int kFewestRows = 17;
constexpr int kFewestRowsOfOtherBits = 9;

// Times in those of one range of a block, about 0.9 us with 64 rows. Measured on an H200 at 14336 x 4096, 4096 x 14336, 4096 x 4096
// and 1024 x 2048.
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

// Whether the scales of a range can be read at once: they lie on as many bytes as they are.
bool scales_are_wide(const Readable& in, int groups) {
  const mx::array& scales = in.weights.scales;
  const auto size = static_cast<int>(scales.itemsize());
  const int bytes = QuantizedSm90::kRange / in.weights.group_size * size;
  const auto aligned = [&](const mx::array& array) { return array.offset() % bytes == 0; };
  return groups * size % bytes == 0 && in.scale_distance % bytes == 0 && aligned(scales) &&
         (!in.weights.biases || aligned(*in.weights.biases));
}

}  // namespace

bool quantized_sm90_takes(int rows, int bits) {
  return rows >= (bits % 4 == 0 ? kFewestRows : kFewestRowsOfOtherBits) && is_hopper();
}

int quantized_sm90_alignment(int bits) {
  return bits % 4 == 0 ? 16 : bits % 2 == 0 ? 8 : 4;
}

void encode_quantized_sm90(
    const mx::array& x,
    int rows,
    const Readable& in,
    const std::optional<mx::array>& lhs_indices,
    const std::optional<mx::array>& rhs_indices,
    mx::array& out,
    mx::cu::CommandEncoder& encoder,
    const mx::Stream& stream) {
  const QuantizedSm90 shape{rows <= 32 ? 32 : rows <= 64 ? 64 : 128};
  const mx::array& w = in.weights.w;
  QuantizedSm90Params params{};
  params.x_row = *row_distance(x);
  params.x_distance = params.x_row * rows;
  params.row_bytes = in.row_bytes;
  params.inner = x.shape(-1);
  params.matrices = static_cast<int>(x.size() / rows / params.inner);
  params.experts = static_cast<int>(w.size() / w.shape(-1) / w.shape(-2));
  params.rows = rows;
  params.columns = out.shape(-1);
  params.groups = in.weights.scales.shape(-1);
  params.block_rows = shape.block_rows;
  params.wide = scales_are_wide(in, params.groups);
  set_weights(params, in);

  const auto products = static_cast<int>(out.size() / rows / params.columns);
  const int row_blocks = divide_up(rows, shape.block_rows);
  const int tiles = divide_up(params.columns, QuantizedSm90::kTileRows);
  const int ranges = divide_up(params.inner, QuantizedSm90::kRange);
  const auto results = static_cast<std::int64_t>(out.size());
  params.range =
      ranges_of_a_block(static_cast<std::int64_t>(tiles) * row_blocks * products, ranges, results) * QuantizedSm90::kRange;
  params.splits = divide_up(params.inner, params.range);

  const int eights = divide_up(rows, 8);
  const int parts = divide_up(params.inner, QuantizedSm90::kPart);
  params.ordered =
      workspace(static_cast<std::size_t>(products) * eights * 8 * parts * QuantizedSm90::kPart * x.itemsize(), encoder, stream);
  if (params.splits > 1) {
    params.results = tiles * row_blocks * products;
    const std::size_t size = static_cast<std::size_t>(params.results) * params.splits * shape.block_rows * QuantizedSm90::kTileRows;
    params.partial = static_cast<float*>(workspace(size * sizeof(float), encoder, stream));
    params.arrived = static_cast<unsigned*>(workspace(params.results * sizeof(unsigned), encoder, stream));
  }
  params.x = mx::gpu_ptr<void>(x);
  params.x_index = lhs_indices ? mx::gpu_ptr<unsigned>(*lhs_indices) : nullptr;
  params.w_index = rhs_indices ? mx::gpu_ptr<unsigned>(*rhs_indices) : nullptr;
  params.out = mx::gpu_ptr<void>(out);
  const std::string format = format_name(in.weights);

  encoder.set_input_array(x);
  if (lhs_indices) {
    encoder.set_input_array(*lhs_indices);
  }
  encoder.set_output_array(out);  // stands for the workspaces, which are no arrays
  encoder.add_kernel_node_ex(
      kernels().function("quantized_sm90_order_" + format),
      dim3(divide_up(static_cast<std::int64_t>(parts) * eights, QuantizedSm90::kOrderWarps), products),
      dim3(QuantizedSm90::kOrderWarps * 32), dim3(), 0, params);

  encoder.set_input_array(out);
  name_inputs(in.weights, encoder);
  if (rhs_indices) {
    encoder.set_input_array(*rhs_indices);
  }
  encoder.set_output_array(out);
  take_lane(encoder);
  encoder.add_kernel_node_ex(
      kernels().function("quantized_sm90_" + format + "_" + type_name(x.dtype()) + "_" + std::to_string(shape.block_rows)),
      dim3(tiles, params.splits * row_blocks, products), dim3(QuantizedSm90::kThreads), dim3(),
      static_cast<unsigned>(shape.shared_bytes(in.weights.bits)), params);
}

}  // namespace mlx_cuda
