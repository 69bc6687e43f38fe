// Turns the status codes of CUDA and its libraries into exceptions that name the call.
//
// Unavailable: this GPU, this build or this version of a library has no such kernel, plan or algorithm. Another way is taken then
// (runtime/fused.cpp).
#pragma once

#include <cublasLt.h>
#include <cuda.h>
#include <cudnn.h>

#include <stdexcept>
#include <string>

namespace mlx_cuda {

class Unavailable : public std::runtime_error {
 public:
  // `remembered`: from now on, queries whether such a call is supported return no.
  explicit Unavailable(const std::string& reason, bool remembered = false) : std::runtime_error(reason), remembered(remembered) {}

  const bool remembered;
};

template <typename Status>
bool succeeded(Status status) {
  return status == Status{};  // 0, of each of them
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

inline bool is_unavailable(CUresult status) {
  switch (status) {
    case CUDA_ERROR_NO_BINARY_FOR_GPU:
    case CUDA_ERROR_INVALID_PTX:
    case CUDA_ERROR_UNSUPPORTED_PTX_VERSION:
    case CUDA_ERROR_JIT_COMPILER_NOT_FOUND:
    case CUDA_ERROR_NOT_FOUND:
    case CUDA_ERROR_NOT_SUPPORTED:
      return true;
    default:
      return false;
  }
}
inline bool is_unavailable(cublasStatus_t status) {
  return status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_ARCH_MISMATCH;
}
inline bool is_unavailable(cudnnStatus_t) {
  return false;  // its graphs say so in their own way (attention/cudnn/plans.cpp)
}

template <typename Status>
void check(Status status, const char* call) {
  if (!succeeded(status)) {
    const std::string text = std::string("[mlx_cuda] ") + call + " failed: " + describe(status);
    if (is_unavailable(status)) {
      throw Unavailable(text);
    }
    throw std::runtime_error(text);
  }
}

}  // namespace mlx_cuda

#define MLX_CUDA_CHECK(call) ::mlx_cuda::check((call), #call)
