#include "matmul/quantized/kernels.h"
#include "matmul/quantized/skinny_params.h"
#include "runtime/device_code.h"
#include "runtime/lanes.h"

#include <algorithm>

namespace mlx_cuda {

namespace {

constexpr int kFewestInner = 64;  // of a split
constexpr int kMostSplits = 32;

KernelModule& kernels() {
  static KernelModule module("quantized_plain");
  return module;
}

}  // namespace

void encode_plain(const SkinnyCall& call) {
  const bool transpose = call.transpose;
  SplitProduct params{};
  call.describe(params);
  params.block_rows = call.kernel.tile;
  params.row_blocks = divide_up(call.rows, params.block_rows);
  const int column_blocks = divide_up(params.columns, transpose ? PlainKernel::kTransposedColumns : PlainKernel::kColumns);
  params.splits = 1;
  if (!transpose) {  // a block has many columns, so there may be few blocks
    const std::int64_t blocks = static_cast<std::int64_t>(column_blocks) * params.row_blocks * call.products;
    const auto wanted = divide_up(8 * multiprocessors(), blocks);
    params.splits = std::clamp(wanted, 1, std::clamp(params.inner / kFewestInner, 1, kMostSplits));
  }
  params.range = divide_up(params.inner, params.splits);
  params.splits = divide_up(params.inner, params.range);
  params.partial = call.partial(params.splits);
  call.name_arrays();
  take_lane(call.encoder);
  call.encoder.add_kernel_node_ex(
      kernels().function(call.kernel.name), dim3(column_blocks, params.splits * params.row_blocks, call.products),
      dim3(PlainKernel::kThreads), dim3(), 0, params);
  encode_split_sum(call, params);
}

void encode_split_sum(const SkinnyCall& call, const SplitProduct& params) {
  if (params.splits == 1) {
    return;
  }
  call.encoder.set_input_array(call.out);
  call.encoder.set_output_array(call.out);
  const float* partial = params.partial;
  void* to = params.out;
  auto size = static_cast<long long>(call.out.size());
  int splits = params.splits;
  call.encoder.add_kernel_node_ex(
      kernels().function("quantized_merge_" + type_name(call.out.dtype())), dim3(divide_up(size, PlainKernel::kThreads)),
      dim3(PlainKernel::kThreads), dim3(), 0, partial, to, size, splits);
}

}  // namespace mlx_cuda
