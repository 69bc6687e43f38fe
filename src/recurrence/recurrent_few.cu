// Linear attention of one token, or a few (recurrent.cu has the formulas): limited by memory bandwidth, so threads share nothing
// and do not wait for each other. Eight lanes have one row of the state.
#include "recurrence/kernels.h"
#include "recurrence/rows.cuh"

namespace mlx_cuda {

template <int Keys, bool Channels>
__device__ inline void recurrent_few(const Recurrence& p) {
  const Work work(p);
  const int row = threadIdx.x / kRecurrentLanes;
  Rows<1, Keys> state;
  state.template load<kRecurrentRows>(p, work, row);
  advance_tokens<Keys, Channels>(p, work, state, row, work.begin, work.end);
  state.template store<kRecurrentRows>(p, work, row);
}

}  // namespace mlx_cuda

#define MLX_CUDA_FEW(name, Keys, Channels)                                                \
  extern "C" __global__ void __launch_bounds__(mlx_cuda::kFewThreads, Keys > 128 ? 1 : 3) \
      name(__grid_constant__ const mlx_cuda::Recurrence p) {                              \
    mlx_cuda::recurrent_few<Keys, Channels>(p);                                           \
  }

MLX_CUDA_RECURRENT_FEW_KERNELS(MLX_CUDA_FEW)
