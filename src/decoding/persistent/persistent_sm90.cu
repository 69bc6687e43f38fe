// GEMVs of a decode step with quantized weights, and what is between them, in one persistent kernel: a block for each
// multiprocessor. While consumers wait for a result, or prepare it, the producers go on loading the weights of later GEMVs.
#include "decoding/persistent/attention.cuh"
#include "decoding/persistent/rows.cuh"
#include "device/types.cuh"

namespace mlx_cuda {

extern __shared__ __align__(128) unsigned char persistent_memory[];

template <typename T, bool Experts>
__device__ inline void run(const PersistentParams& p) {
  using Params = PersistentParams;
  using Shape = PersistentShape<Experts>;
  // Instructions are read at a running index, at which the constant cache is slow.
  auto* const shares = reinterpret_cast<Share*>(persistent_memory);
  constexpr int words = sizeof(PersistentGemv) / 4;
  for (int i = static_cast<int>(threadIdx.x / 32); i < p.count; i += Shape::kThreads / 32) {
    for (int word = static_cast<int>(threadIdx.x % 32); word < words; word += 32) {
      reinterpret_cast<unsigned*>(&shares[i].gemv)[word] = reinterpret_cast<const unsigned*>(&p.gemv[i])[word];
    }
  }
  unsigned char* const attentions = persistent_memory + PersistentParams::shares_bytes();
  for (int i = static_cast<int>(threadIdx.x); i < p.attentions * static_cast<int>(sizeof(PersistentAttention)) / 4;
       i += Shape::kThreads) {
    reinterpret_cast<unsigned*>(attentions)[i] = reinterpret_cast<const unsigned*>(p.attention)[i];
  }
  const auto blocks = static_cast<int>(gridDim.x);
  if (const auto i = static_cast<int>(threadIdx.x); i < p.count) {
    const int each = p.gemv[i].share_quads;
    const int count = p.gemv[i].quads / each;
    shares[i].begin = count * static_cast<int>(blockIdx.x) / blocks * each;
    shares[i].end = count * (static_cast<int>(blockIdx.x) + 1) / blocks * each;
  }
  unsigned char* const slots = attentions + PersistentParams::attentions_bytes();
  unsigned char* const x = slots + p.slots * (p.slot_bytes + PersistentParams::kSlotState);
  auto* const route = reinterpret_cast<PersistentRoute*>(persistent_memory + p.shared_bytes()) - 1;
  const Ring<Experts> ring(p, shares, route, slots);
  if (threadIdx.x == 0) {
    ring.init();
  }
  __syncthreads();
  if constexpr (!Experts) {
    if (const auto i = static_cast<int>(threadIdx.x); i < p.count) {
      shares[i].chunks = Chunks<Experts>(shares[i]).count();
    }
    __syncthreads();
  }
  launch_dependents();
  const auto warp = static_cast<int>(threadIdx.x) / 32;
  if (warp >= Shape::kWarps + Params::kAttentionWarps) {
    give_registers<Shape::kProducerRegisters>();
    const int matrix = warp - Shape::kWarps - Params::kAttentionWarps;
    if (threadIdx.x % 32 == 0 && matrix < Params::kMatrices) {
      ring.produce(matrix);
    }
    return;
  }
  if (warp >= Shape::kWarps) {
    take_registers<Shape::kAttentionRegisters>();
    wait_for_grids();
    unsigned char* const memory = x + Params::x_bytes(p.most_inner) + Params::squares_bytes() + Params::sums_bytes();
    const int thread = static_cast<int>(threadIdx.x) - Shape::kWarps * 32;
    for (int i = 0; i < p.attentions; ++i) {
      const auto& attention = reinterpret_cast<const PersistentAttention*>(attentions)[i];
      AttentionStep<T>(attention, thread, memory, p.arrived, Params::kMost + i).run();
    }
    return;
  }
  take_registers<Shape::kConsumerRegisters>();  // those that it has: ptxas counts from here
  wait_for_grids();
  constexpr unsigned unset = static_cast<unsigned>(Params::kUnset);
  for (int i = static_cast<int>(blockIdx.x * Shape::kWarps * 32 + threadIdx.x); i < p.cleared_bytes / 16;
       i += static_cast<int>(gridDim.x) * Shape::kWarps * 32) {
    static_cast<uint4*>(p.cleared)[i] = make_uint4(unset, unset, unset, unset);
  }
  PersistentRows<T, Experts> rows(p, shares, ring, route, x);
  for (int i = 0; i < p.count; ++i) {
    rows.run(i);
  }
}

}  // namespace mlx_cuda

#define MLX_CUDA_PERSISTENT(name, dtype, experts)                                               \
  extern "C" __global__ void __launch_bounds__(mlx_cuda::PersistentShape<experts>::kThreads, 1) \
      name(const __grid_constant__ mlx_cuda::PersistentParams params) {                         \
    mlx_cuda::run<mlx_cuda::types::dtype, experts>(params);                                     \
  }
MLX_CUDA_PERSISTENT_KERNELS(MLX_CUDA_PERSISTENT)
