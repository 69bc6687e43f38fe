#include "matmul/dense/epilogue.h"

#include "runtime/device_code.h"

#include <mlx/backend/cuda/utils.h>

#include <algorithm>
#include <cstdint>
#include <string>

namespace mlx_cuda {

namespace {

constexpr long long kThreads = 256;

CUfunction kernel(const char* name, mx::Dtype dtype) {
  static KernelModule module("epilogue");
  return module.function(std::string(name) + (dtype == mx::float32 ? "float32" : dtype == mx::float16 ? "float16" : "bfloat16"));
}

void* data(const std::optional<mx::array>& in) {
  return in ? mx::gpu_ptr<void>(*in) : nullptr;
}

void name_input(const std::optional<mx::array>& in, mx::cu::CommandEncoder& encoder) {
  if (in) {
    encoder.set_input_array(*in);
  }
}

}  // namespace

void encode_epilogue(
    mx::array& out,
    mx::array* inside,
    const std::optional<mx::array>& bias,
    Activation activation,
    mx::cu::CommandEncoder& encoder) {
  encoder.set_input_array(out);
  name_input(bias, encoder);
  encoder.set_output_array(out);
  if (inside) {
    encoder.set_output_array(*inside);
  }
  void* out_data = mx::gpu_ptr<void>(out);
  void* inside_data = inside ? mx::gpu_ptr<void>(*inside) : nullptr;
  const void* bias_data = data(bias);
  auto size = static_cast<long long>(out.size());
  auto columns = static_cast<long long>(out.shape(-1));
  const auto blocks = static_cast<unsigned>(std::min<long long>((size + kThreads - 1) / kThreads, 1 << 16));
  encoder.add_kernel_node_ex(
      kernel("epilogue_", out.dtype()), dim3(blocks), dim3(kThreads), dim3(), 0, out_data, inside_data, bias_data, size, columns,
      activation);
}

void encode_scaling(
    const void* product,
    mx::array& out,
    const std::optional<mx::array>& scale_a,
    const std::optional<mx::array>& scale_b,
    const std::optional<mx::array>& bias,
    mx::cu::CommandEncoder& encoder) {
  encoder.set_input_array(out);
  for (const auto* in : {&scale_a, &scale_b, &bias}) {
    name_input(*in, encoder);
  }
  encoder.set_output_array(out);
  void* out_data = mx::gpu_ptr<void>(out);
  const void* a = data(scale_a);
  const void* b = data(scale_b);
  const void* bias_data = data(bias);
  int a_step = scale_a && scale_a->size() > 1;
  int b_step = scale_b && scale_b->size() > 1;
  auto rows = static_cast<long long>(out.shape(0));
  auto columns = static_cast<long long>(out.shape(1));
  const dim3 grid(static_cast<unsigned>((columns + kThreads - 1) / kThreads), static_cast<unsigned>(std::min(rows, 65535LL)));
  encoder.add_kernel_node_ex(
      kernel("scaling_", out.dtype()), grid, dim3(kThreads), dim3(), 0, product, out_data, a, a_step, b, b_step, bias_data, rows,
      columns);
}

}  // namespace mlx_cuda
