// Kernels that may begin before those that they depend on have ended (device/ptx.cuh), where a graph says so.
#pragma once

#include <cuda.h>

namespace mlx_cuda {

// Says of a kernel that it waits itself before it reads what others write. Thread-safe.
void begins_early(CUfunction kernel);

// Whether that was said.
bool can_begin_early(CUfunction kernel);

}  // namespace mlx_cuda
