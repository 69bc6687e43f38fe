#include "matmul/dense/epilogue.h"

#include "matmul/dense/kernels.h"
#include "runtime/device_code.h"
#include "runtime/kernel_table.h"
#include "runtime/node.h"

#include <algorithm>

namespace mlx_cuda {

namespace {

constexpr long long kThreads = 256;

KernelModule kernels("epilogue");

constexpr auto kEpilogue =
    std::to_array<KernelRow<std::string_view>>({MLX_CUDA_EPILOGUE_KERNELS(MLX_CUDA_KERNEL_ROW, MLX_CUDA_NO_ROW)});
constexpr auto kScaling =
    std::to_array<KernelRow<std::string_view>>({MLX_CUDA_EPILOGUE_KERNELS(MLX_CUDA_NO_ROW, MLX_CUDA_KERNEL_ROW)});

}  // namespace

void encode_epilogue(mx::array& out, mx::array* inside, const MaybeArray& bias, Activation activation, CommandEncoder& encoder) {
  KernelNode node(encoder);
  node.reads(out);
  const void* bias_data = node.reads(bias);
  void* out_data = node.writes(out);
  void* inside_data = inside ? node.writes(*inside) : nullptr;
  const auto size = static_cast<long long>(out.size());
  const auto columns = static_cast<long long>(out.shape(-1));
  const auto blocks = static_cast<unsigned>(std::min<long long>(ceil_div(size, kThreads), 1 << 16));
  node.launch(
      kernels.function(kernel_for(kEpilogue, type_name(out.dtype()))), blocks, kThreads, 0, out_data, inside_data, bias_data, size,
      columns, activation);
}

void encode_scaling(
    const void* gemm,
    mx::array& out,
    const MaybeArray& scale_a,
    const MaybeArray& scale_b,
    const MaybeArray& bias,
    CommandEncoder& encoder) {
  KernelNode node(encoder);
  node.reads(out);
  const void* a = node.reads(scale_a);
  const void* b = node.reads(scale_b);
  const void* bias_data = node.reads(bias);
  void* out_data = node.writes(out);
  const int a_step = scale_a && scale_a->size() > 1;
  const int b_step = scale_b && scale_b->size() > 1;
  const auto rows = static_cast<long long>(out.shape(0));
  const auto columns = static_cast<long long>(out.shape(1));
  const dim3 grid(ceil_div(columns, kThreads), std::min<long long>(rows, kMostGridRows));
  node.launch(
      kernels.function(kernel_for(kScaling, type_name(out.dtype()))), grid, kThreads, 0, gemm, out_data, a, a_step, b, b_step,
      bias_data, rows, columns);
}

}  // namespace mlx_cuda
