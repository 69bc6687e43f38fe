// A row-contiguous copy of a strided view, one element a thread. Views that need it are rare (the fused kernels read most layouts
// in place), so it is plain; consecutive threads write consecutive elements.
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

}  // namespace mlx_cuda

extern "C" __global__ void __launch_bounds__(256)
    copy_8bit(const unsigned char* in, unsigned char* out, long long size, mlx_cuda::Layout layout) {
  mlx_cuda::copy(in, out, size, layout);
}

extern "C" __global__ void __launch_bounds__(256)
    copy_16bit(const unsigned short* in, unsigned short* out, long long size, mlx_cuda::Layout layout) {
  mlx_cuda::copy(in, out, size, layout);
}

extern "C" __global__ void __launch_bounds__(256)
    copy_32bit(const unsigned int* in, unsigned int* out, long long size, mlx_cuda::Layout layout) {
  mlx_cuda::copy(in, out, size, layout);
}
