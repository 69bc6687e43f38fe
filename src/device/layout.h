// The layout of a strided view, in a form that host code fills and a kernel takes by value.
#pragma once

namespace mlx_cuda {

// The most dimensions of more than one element.
inline constexpr int kMaxDimensions = 8;

struct Layout {
  int dimensions;
  int shape[kMaxDimensions];
  long long strides[kMaxDimensions];  // in elements; zero or negative is fine
};

}  // namespace mlx_cuda

// Kernels of copy.cu. EACH(name, type, bytes).
#define MLX_CUDA_COPY_KERNELS(EACH) \
  EACH(copy_8bit, unsigned char, 1) EACH(copy_16bit, unsigned short, 2) EACH(copy_32bit, unsigned int, 4)
