#include "matmul/quantized/choice.h"

#include "matmul/quantized/kernels.h"
#include "runtime/device_code.h"
#include "runtime/kernel_table.h"

#include <cmath>
#include <limits>

namespace mlx_cuda {

namespace {

constexpr int kUpstreamAlignment = 16;  // bytes

// Rows from which on putting x in order pays on Hopper.
constexpr int kFewestSm90Rows = 17;
constexpr int kFewestSm90RowsOfOtherBits = 9;

// Where the kernel for pairs is faster than small-M GEMM.
constexpr int kLeastMoeInner = 768;
constexpr int kMostMoeInner = 4096;
constexpr int kFullMoeInner = 2048;  // from which on there have to be as many tiles as blocks
constexpr double kShared8 = 0.75;    // experts that are different, of the pairs, with 8 bits

using Row = KernelRow<std::string_view, std::string_view, int>;  // rows of x, or tiles of them
constexpr auto kTransposed = std::to_array<Row>({MLX_CUDA_PLAIN_KERNELS(MLX_CUDA_FORMAT_ROW, MLX_CUDA_NO_ROW)});
constexpr auto kPlain = std::to_array<Row>({MLX_CUDA_PLAIN_KERNELS(MLX_CUDA_NO_ROW, MLX_CUDA_FORMAT_ROW)});
constexpr auto kSmallM = std::to_array<Row>({MLX_CUDA_SMALL_M_KERNELS(MLX_CUDA_FORMAT_ROW, MLX_CUDA_FORMAT_ROW)});
constexpr auto kSm90 = std::to_array<Row>({MLX_CUDA_QUANTIZED_SM90_KERNELS(MLX_CUDA_NO_ROW, MLX_CUDA_FORMAT_ROW)});
constexpr auto kMoe = std::to_array<KernelRow<std::string_view, std::string_view>>({MLX_CUDA_MOE_KERNELS(MLX_CUDA_FORMAT_ROW)});

// Whether MLX's kernel for one row reads it: it wants rows one after another.
bool upstream_reads(const mx::array& in) {
  return in.flags().row_contiguous && in.strides(-1) == 1 && in.strides(-2) == in.shape(-1) &&
         is_aligned(in, 0, kUpstreamAlignment);
}

bool upstream_reads(const mx::array& x, const QuantizedWeights& weights) {
  return upstream_reads(x) && upstream_reads(weights.w) && upstream_reads(weights.scales) &&
         (!weights.biases || upstream_reads(*weights.biases));
}

bool sm90_takes(int rows, int bits) {
  return rows >= (bits % 4 == 0 ? kFewestSm90Rows : kFewestSm90RowsOfOtherBits) && is_hopper();
}

bool moe_takes(const QuantizedWeights& weights, int pairs) {
  const int inner = weights.inner();
  const int bits = weights.bits;
  const int columns = weights.w.shape(-2);
  const std::int64_t items = static_cast<std::int64_t>(pairs) * (columns / SmallMTile::kRows);
  const int fewest = multiprocessors() * (inner > kFullMoeInner ? MoeParams::kBlocks : 1);
  const int most = std::numeric_limits<int>::max() / SmallMTile::kRows;  // the kernel counts results by an int
  const bool fits = pairs <= MoeParams::kMostPairs && items <= most && inner % SmallMTile::kSlice == 0 &&
                    columns % SmallMTile::kRows == 0 && scales_are_wide(weights);
  const bool faster = inner >= kLeastMoeInner && inner <= kMostMoeInner && items >= fewest &&
                      (bits == 2 || bits == 4 || (bits == 8 && different_experts(pairs, weights.matrices()) < kShared8));
  return fits && faster && is_hopper();
}

}  // namespace

SmallMKernel choose_small_m(
    const mx::array& x, const QuantizedWeights& weights, std::optional<int> pairs, bool transpose, bool small) {
  const int inner = x.shape(-1);
  const int rows = pairs ? x.shape(-2) : static_cast<int>(x.size() / inner);
  const std::string dtype = type_name(x.dtype());
  const std::string format = format_name(weights);
  if (small && x.ndim() > 1 && upstream_reads(x, weights)) {  // which takes no vector
    return {SmallMEngine::upstream};
  }
  const bool tensor_cores =
      x.dtype() != mx::float32 && transpose && inner % SmallMParams::kChunk == 0 && compute_capability() >= 80;
  if (!tensor_cores) {
    const int tile = transpose && rows == 1 && x.dtype() == mx::float32 ? 1 : PlainKernel::kRows;
    const char* kernel = transpose ? kernel_for(kTransposed, dtype, format, tile) : kernel_for(kPlain, dtype, format, tile);
    return {SmallMEngine::plain, tile, "quantized_plain", kernel};
  }
  if (sm90_takes(rows, weights.bits)) {
    const int tile = rows <= 32 ? 32 : rows <= 64 ? 64 : 128;
    return {SmallMEngine::sm90, tile, "quantized_sm90", kernel_for(kSm90, dtype, format, tile)};
  }
  if (pairs && rows == 1 && moe_takes(weights, *pairs)) {
    return {SmallMEngine::moe, 1, "quantized_moe_sm90", kernel_for(kMoe, dtype, format)};
  }
  const int tile = rows <= 8 ? 8 : rows <= 16 ? 16 : 32;
  return {SmallMEngine::small_m, tile, "quantized_small_m", kernel_for(kSmallM, dtype, format, tile / 8)};
}

double different_experts(int pairs, int experts) {
  return experts * (1.0 - std::pow(1.0 - 1.0 / experts, pairs)) / pairs;
}

}  // namespace mlx_cuda
