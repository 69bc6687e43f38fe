// A row-contiguous copy of a strided view, one element per thread. Views that need it are rare (the fused kernels read most
// layouts in place), so it is simple; adjacent threads write adjacent elements.
#include "device/layout.h"

namespace mlx_cuda {

template <typename T>
__device__ inline void copy(const T* in, T* out, long long size, const Layout& layout) {
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < size; i += step) {
    long long rest = i;
    long long offset = 0;
    for (int axis = layout.dimensions - 1; axis >= 0; --axis) {
      offset += rest % layout.shape[axis] * layout.strides[axis];
      rest /= layout.shape[axis];
    }
    out[i] = in[offset];
  }
}

#define MLX_CUDA_COPY(name, T, bytes)                                                                          \
  extern "C" __global__ void __launch_bounds__(256) name(const T* in, T* out, long long size, Layout layout) { \
    copy(in, out, size, layout);                                                                               \
  }
MLX_CUDA_COPY_KERNELS(MLX_CUDA_COPY)

}  // namespace mlx_cuda
