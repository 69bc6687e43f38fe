// Programmatic dependent launch (device/ptx.cuh): kernels that may begin before those that they depend on, where a graph says so.
#pragma once

#include <cuda.h>

namespace mlx_cuda {

// The kernel, of which this says that it waits itself before it reads what others write. Thread-safe.
CUfunction with_pdl(CUfunction kernel);

// Whether that was said.
bool has_pdl(CUfunction kernel);

// The kernel, of which this says that its blocks wait for each other: it may begin only when all of them can be resident.
CUfunction with_all_blocks(CUfunction kernel);
bool needs_all_blocks(CUfunction kernel);

}  // namespace mlx_cuda
