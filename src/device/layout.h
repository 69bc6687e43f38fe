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
