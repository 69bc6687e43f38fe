#include "runtime/kernels.h"

#include "runtime/status.h"

namespace mlx_cuda {

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
  } catch (...) {
    functions_.erase(place);
    throw;
  }
  return place->second;
}

}  // namespace mlx_cuda
