#include "matmul/quantized/kernels.h"
#include "matmul/quantized/moe_params.h"
#include "runtime/device_code.h"
#include "runtime/lanes.h"

#include <algorithm>

namespace mlx_cuda {

namespace {

constexpr int kMostShared = 32 << 10;  // bytes of a block: with more, what is left of the first cache is too small for the scales
constexpr int kBatchRows = 4;
constexpr int kFewestShared = 9;         // pairs: the experts of one token are different
constexpr double kMostDifferent = 0.92;  // experts, of the pairs: with more, finding the others costs what it saves

KernelModule& kernels() {
  static KernelModule module("quantized_moe_sm90");
  return module;
}

}  // namespace

void encode_moe(const SkinnyCall& call) {
  const mx::array& scales = call.in.weights.scales;
  MoeParams params{};
  call.describe(params);
  params.row_scales = params.groups * static_cast<int>(scales.itemsize());
  params.pairs = call.products;

  const int slices = params.inner / SkinnyTile::kSlice;
  const int warps = divide_up(slices, divide_up(slices, MoeParams::kMostWarps));
  params.batch_rows = 1;
  if (params.pairs >= kFewestShared && different_experts(params.pairs, params.experts) < kMostDifferent) {
    params.batch_rows = kBatchRows;
    while (params.shared_bytes(warps) > kMostShared) {
      --params.batch_rows;
    }
  }
  const std::int64_t items = static_cast<std::int64_t>(params.pairs) * (params.columns / SkinnyTile::kRows);
  const int blocks = multiprocessors() * std::min(divide_up(items, multiprocessors()), MoeParams::kBlocks);
  call.name_arrays();
  take_lane(call.encoder);
  call.encoder.add_kernel_node_ex(
      kernels().function(call.kernel.name), dim3(blocks), dim3(warps * 32), dim3(),
      static_cast<unsigned>(params.shared_bytes(warps)), params);
}

}  // namespace mlx_cuda
