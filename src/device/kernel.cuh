// How kernels are made of the functions that do their work.
#pragma once

// A kernel in the namespace of the function that it passes its parameters to. `bounds`: those of its launch, in parentheses.
#define MLX_CUDA_KERNEL(name, bounds, Params, ...)                                                  \
  extern "C" __global__ void __launch_bounds__ bounds name(const __grid_constant__ Params params) { \
    __VA_ARGS__(params);                                                                            \
  }
