// Kernels that begin before those that they depend on have ended (programmatic dependent launch, sm_90 and newer).
#pragma once

namespace mlx_cuda {

// Lets the kernels that wait for this one begin as soon as all of its blocks have.
__device__ inline void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Returns when all that this kernel depends on is done and its results can be read.
__device__ inline void wait_for_grids() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// For kernels that have nothing to do before that.
__device__ inline void begin_early() {
  launch_dependents();
  wait_for_grids();
}

}  // namespace mlx_cuda
