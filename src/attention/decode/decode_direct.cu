// Decode attention with little work per SM, split-K: a unit (batch entry and kv head) is cut into equal parts, a block for each.
//
// The pipeline of decode.cu pays if an SM has much to read. Here keys and values go from global memory directly into the
// fragments of mma.m16n8k16, without shared memory in between, and a block starts and ends sooner.
#include "attention/decode/kernels.h"
#include "attention/decode/split.cuh"
#include "attention/decode/tile.cuh"
#include "device/ptx.cuh"
#include "device/types.cuh"

namespace mlx_cuda {

// The tiles of 16 keys that a warp takes, every `stride` keys. Masked: a bool mask of one row hides keys, and tiles without any are
// never read.
template <bool Masked>
struct WarpTiles {
  const Segment& s;
  int stride;
  unsigned* bits;  // [tile]: which of its keys are seen

  // Reads the mask once, before the keys.
  __device__ void read_mask(const DecodeParams& p) {
    const int tiles = (s.last - s.first + DirectTraits::kTileKeys - 1) / DirectTraits::kTileKeys;
    for (int index = threadIdx.x; index < tiles; index += static_cast<int>(blockDim.x)) {
      bits[index] = mask_bits(p, s, s.first + index * DirectTraits::kTileKeys);
    }
  }
  __device__ unsigned seen(int tile) const {
    return bits[(tile - s.first) / DirectTraits::kTileKeys];
  }
  // The first at or after `tile` with keys to be read.
  __device__ int from(int tile) const {
    while (Masked && tile < s.last && seen(tile) == 0) {
      tile += stride;
    }
    return tile;
  }
};

template <typename T, int D, bool Masked>
__device__ inline void direct(const DecodeParams& p) {
  constexpr int kTileKeys = DirectTraits::kTileKeys;
  launch_dependents();
  const int begin = static_cast<int>(blockIdx.x) * p.split_k.keys;
  ask_ahead<T>(p, blockIdx.z, blockIdx.y, begin, min(end_ahead(p, blockIdx.z), begin + p.split_k.keys), threadIdx.x, blockDim.x);
  wait_for_grids();
  const int lane = threadIdx.x % 32;
  const int slice = threadIdx.x / 32;
  const int slices = static_cast<int>(blockDim.x) / 32;
  const Segment s = part_of_unit<false>(p);
  const int parts = parts_of_unit(p, s.span);
  if (static_cast<int>(blockIdx.x) >= parts) {
    return;
  }

  extern __shared__ uint4 memory[];
  uint4* shared = memory + (Masked ? DirectTraits::mask_bytes(p.split_k.keys) / 16 : 0);
  WarpTiles<Masked> tiles{s, slices * kTileKeys, reinterpret_cast<unsigned*>(memory)};
  if constexpr (Masked) {
    tiles.read_mask(p);
  }
  share_queries<T, D>(p, s, shared, kTileRows);

  const T* k_head = static_cast<const T*>(p.k) + s.batch * p.k_strides.batch + s.kv_head * p.k_strides.head;
  const T* v_head = static_cast<const T*>(p.v) + s.batch * p.v_strides.batch + s.kv_head * p.v_strides.head;
  const uint4* queries = shared + lane;
  TileRows<T, D> rows;
  rows.clear();
  uint4 keys[2][D / 32];
  if constexpr (Masked) {
    __syncthreads();
  }
  int tile = tiles.from(s.first + slice * kTileKeys);
  uint4 values[D / 64][4];
  if (tile < s.last) {
    load_keys<T, D>(p, s, k_head, tile, keys);
    load_values<T, D>(p, s, v_head, tile, values);
  }
  __syncthreads();
  while (tile < s.last) {
    const int next = tiles.from(tile + tiles.stride);
    float scores[2][4] = {};
#pragma unroll
    for (int i = 0; i < D / 32; ++i) {
      add_scores<T>(scores, queries[2 * i * 32], queries[(2 * i + 1) * 32], keys[0][i], keys[1][i]);
    }
    if (next < s.last) {
      load_keys<T, D>(p, s, k_head, next, keys);
    }
    float unit;
    if constexpr (Masked) {
      unit = mask_tile(p, scores, tiles.seen(tile));
    } else {
      unit = restrict_tile<T, 2>(p, s, scores, lane / 4, tile);
    }
    const uint4 weights = rows.weigh(scores, unit);
#pragma unroll
    for (int b = 0; b < D / 64; ++b) {
      rows.add(weights, b, values[b]);
    }
    if (next < s.last) {
      load_values<T, D>(p, s, v_head, next, values);
    }
    tile = next;
  }

  const unsigned long long ticket = read_ticket(p, s);
  float* results = reinterpret_cast<float*>(shared);
  rows.write(p, s, results, slice, slices, 0, s.rows);
  if (s.slot >= 0) {
    merge_parts<T>(p, s, {parts, s.unit * p.split_k.splits, s.unit * p.split_k.splits, 1}, ticket, results);
  }
}

}  // namespace mlx_cuda

#define MLX_CUDA_DIRECT(name, dtype, D, MASKED)                                             \
  extern "C" __global__ void __launch_bounds__(                                             \
      mlx_cuda::DirectTraits::kMostWarps * 32, mlx_cuda::DirectTraits{D}.resident_blocks()) \
      name(const __grid_constant__ mlx_cuda::DecodeParams params) {                         \
    mlx_cuda::direct<mlx_cuda::types::dtype, D, MASKED>(params);                            \
  }
MLX_CUDA_DIRECT_KERNELS(MLX_CUDA_DIRECT)
