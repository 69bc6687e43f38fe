// Programmatic dependent launch (device/ptx.cuh): kernels that may begin before those that they depend on, where a graph says so.
#pragma once

#include <cuda.h>

namespace mlx_cuda {

// Says of a kernel that it waits itself before it reads what others write. Thread-safe.
void enable_pdl(CUfunction kernel);

// Whether that was said.
bool has_pdl(CUfunction kernel);

}  // namespace mlx_cuda
