// Turns the status codes of CUDA and its libraries into exceptions that name the call.
#pragma once

#include <cublasLt.h>
#include <cuda.h>
#include <cudnn.h>

#include <stdexcept>
#include <string>

namespace mlx_cuda {

inline bool succeeded(CUresult status) {
  return status == CUDA_SUCCESS;
}
inline bool succeeded(cublasStatus_t status) {
  return status == CUBLAS_STATUS_SUCCESS;
}
inline bool succeeded(cudnnStatus_t status) {
  return status == CUDNN_STATUS_SUCCESS;
}

inline std::string describe(CUresult status) {
  const char* name = nullptr;
  const char* text = nullptr;
  cuGetErrorName(status, &name);
  cuGetErrorString(status, &text);
  return std::string(name ? name : "unknown CUDA error") + " (" + (text ? text : "no description") + ")";
}
inline std::string describe(cublasStatus_t status) {
  return "cuBLAS status " + std::to_string(static_cast<int>(status));
}
inline std::string describe(cudnnStatus_t status) {
  return cudnnGetErrorString(status);
}

template <typename Status>
void check(Status status, const char* call) {
  if (!succeeded(status)) {
    throw std::runtime_error(std::string("[mlx_cuda] ") + call + " failed: " + describe(status));
  }
}

}  // namespace mlx_cuda

#define MLX_CUDA_CHECK(call) ::mlx_cuda::check((call), #call)
