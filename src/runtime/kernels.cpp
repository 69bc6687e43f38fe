#include "runtime/kernels.h"

#include "runtime/status.h"

namespace mlx_cuda {

int device_attribute(CUdevice_attribute attribute) {
  CUdevice device = 0;
  int value = 0;
  MLX_CUDA_CHECK(cuCtxGetDevice(&device));
  MLX_CUDA_CHECK(cuDeviceGetAttribute(&value, attribute, device));
  return value;
}

int shared_memory_limit() {
  return device_attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
}

int multiprocessors() {
  return device_attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
}

CUfunction KernelModule::function(const std::string& name) {
  CUcontext context = nullptr;
  MLX_CUDA_CHECK(cuCtxGetCurrent(&context));
  const std::lock_guard lock(mutex_);
  auto [place, is_new] = functions_.try_emplace({name, context}, nullptr);
  if (!is_new) {
    return place->second;
  }
  try {
    if (!library_) {
      MLX_CUDA_CHECK(cuLibraryLoadData(&library_, fatbin_, nullptr, nullptr, 0, nullptr, nullptr, 0));
    }
    CUkernel kernel = nullptr;
    MLX_CUDA_CHECK(cuLibraryGetKernel(&kernel, library_, name.c_str()));
    MLX_CUDA_CHECK(cuKernelGetFunction(&place->second, kernel));
    int fixed = 0;
    MLX_CUDA_CHECK(cuFuncGetAttribute(&fixed, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, place->second));
    MLX_CUDA_CHECK(
        cuFuncSetAttribute(place->second, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_memory_limit() - fixed));
  } catch (...) {
    functions_.erase(place);
    throw;
  }
  return place->second;
}

}  // namespace mlx_cuda
