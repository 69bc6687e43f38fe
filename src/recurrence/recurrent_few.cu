// Linear attention of one token, or a few (recurrent.cu has the formulas): limited by memory bandwidth, so threads share nothing
// and do not wait for each other. Eight lanes have a few rows of the state, so that many loads are on their way.
#include "device/kernel.cuh"
#include "recurrence/kernels.h"
#include "recurrence/rows.cuh"

namespace mlx_cuda {

template <int Keys, bool Channels>
__device__ inline void recurrent_few(const Recurrence& p) {
  constexpr int kApart = kFewThreads / kRecurrentLanes;
  const Work work(p);
  const int row = threadIdx.x / kRecurrentLanes;
  Rows<kRecurrentRows / kApart, Keys> state;
  state.template load<kApart>(p, work, row);
  // With a decay for each head, the dtypes of models in bfloat16 are known to the compiler: no branch is between loads.
  const Stored half = Stored::bfloat16;
  if (!Channels && !p.mask && p.q.type == half && p.k.type == half && p.v.type == half && p.beta.type == half &&
      p.g.type == Stored::float32) {
    Recurrence known = p;
    known.q.type = known.k.type = known.v.type = known.beta.type = half;
    known.g.type = Stored::float32;
    known.mask = nullptr;
    advance_tokens<kApart, Channels>(known, work, state, row, work.begin, work.end);
  } else {
    advance_tokens<kApart, Channels>(p, work, state, row, work.begin, work.end);
  }
  state.template store<kApart>(p, work, row);
}

#define MLX_CUDA_FEW(name, Keys, Channels) \
  MLX_CUDA_KERNEL(name, (kFewThreads, Keys > 128 ? 1 : kFewBlocks), Recurrence, recurrent_few<Keys, Channels>)
MLX_CUDA_RECURRENT_FEW_KERNELS(MLX_CUDA_FEW)

}  // namespace mlx_cuda
