#include "runtime/kernels.h"

#include "runtime/status.h"

#include <cstdlib>

namespace mlx_cuda {

int device_attribute(CUdevice_attribute attribute) {
  CUdevice device = 0;
  int value = 0;
  MLX_CUDA_CHECK(cuCtxGetDevice(&device));
  MLX_CUDA_CHECK(cuDeviceGetAttribute(&value, attribute, device));
  return value;
}

int compute_capability() {
  static const char* named = std::getenv("MLX_CUDA_CAPABILITY");
  static const int believed = named ? std::atoi(named) : 0;  // Python refuses what is no number (_native.py)
  return believed > 0 ? believed
                      : 10 * device_attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) +
                            device_attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
}

bool is_hopper() {
  return compute_capability() / 10 == 9;
}

int shared_memory_limit() {
  return device_attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
}

int multiprocessors() {
  return device_attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
}

std::string type_name(mlx::core::Dtype dtype) {
  using namespace mlx::core;
  return dtype == float32 ? "float32" : dtype == float16 ? "float16" : "bfloat16";
}

CUfunction KernelModule::function(std::string_view name) {
  CUcontext context = nullptr;
  MLX_CUDA_CHECK(cuCtxGetCurrent(&context));
  const std::lock_guard lock(mutex_);
  auto& functions = functions_[context];
  if (const auto known = functions.find(name); known != functions.end()) {
    return known->second;
  }
  if (!library_) {
    MLX_CUDA_CHECK(cuLibraryLoadData(&library_, fatbin_, nullptr, nullptr, 0, nullptr, nullptr, 0));
  }
  const std::string terminated(name);
  CUkernel kernel = nullptr;
  CUfunction function = nullptr;
  MLX_CUDA_CHECK(cuLibraryGetKernel(&kernel, library_, terminated.c_str()));
  MLX_CUDA_CHECK(cuKernelGetFunction(&function, kernel));
  int fixed = 0;
  MLX_CUDA_CHECK(cuFuncGetAttribute(&fixed, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function));
  MLX_CUDA_CHECK(cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_memory_limit() - fixed));
  functions.emplace(terminated, function);
  return function;
}

}  // namespace mlx_cuda
