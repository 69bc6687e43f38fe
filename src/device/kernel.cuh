// How kernels are made of the functions that do their work.
#pragma once

// A kernel that passes its parameters on; it stands in the function's namespace. `bounds`: those of its launch, in parentheses.
#define MLX_CUDA_KERNEL(name, bounds, Params, ...)                                                  \
  extern "C" __global__ void __launch_bounds__ bounds name(const __grid_constant__ Params params) { \
    __VA_ARGS__(params);                                                                            \
  }
