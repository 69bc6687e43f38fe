// Reads a mask of attention once: which tiles of it hide everything and which nothing, and for a bool mask its bits.
//
// The flash kernels then skip hidden tiles, and read an eighth of the mask's bytes where it matters.
#include "kernels/mask_tiles.h"

#include "kernels/numbers.cuh"
#include "kernels/vector.cuh"

namespace mlx_cuda {

// The lowest bit of each of eight bytes that are not 0.
__device__ inline unsigned bits_of(unsigned long long bytes) {
  bytes |= bytes >> 4;
  bytes |= bytes >> 2;
  bytes |= bytes >> 1;
  bytes &= 0x0101010101010101ull;
  return static_cast<unsigned>(bytes * 0x0102040810204080ull >> 56);
}

// The bits of up to 32 keys of a row.
__device__ inline unsigned word_of(const unsigned char* row, long long stride, int key, int keys) {
  const unsigned char* from = row + key * stride;
  if (stride == 1 && key + 32 <= keys && reinterpret_cast<unsigned long long>(from) % 16 == 0) {
    const uint4 low = *reinterpret_cast<const uint4*>(from);
    const uint4 high = *reinterpret_cast<const uint4*>(from + 16);
    auto eight = [](unsigned a, unsigned b) { return bits_of(a | static_cast<unsigned long long>(b) << 32); };
    return eight(low.x, low.y) | eight(low.z, low.w) << 8 | eight(high.x, high.y) << 16 | eight(high.z, high.w) << 24;
  }
  unsigned bits = 0;
  for (int i = 0; i < min(32, keys - key); ++i) {
    bits |= static_cast<unsigned>(from[i * stride] != 0) << i;
  }
  return bits;
}

// Which of up to 32 keys of a row an additive mask does not hide, and which it leaves as they are.
template <typename T>
__device__ inline uint2 words_of(const T* row, long long stride, int key, int keys) {
  uint2 bits = make_uint2(0, 0);
  for (int i = 0; i < min(32, keys - key); ++i) {
    const float bias = to_float(row[(key + i) * stride]);
    bits.x |= static_cast<unsigned>(bias != -kInfinity) << i;
    bits.y |= static_cast<unsigned>(bias == 0) << i;
  }
  return bits;
}

// Block (tile of keys, tile of rows, batch entry and head).
template <typename T>
__device__ inline void mask_states(const MaskTilesParams& p) {
  const int batch = blockIdx.z / p.heads;
  const int head = blockIdx.z % p.heads;
  const int per_row = p.tile_keys / 32;
  const T* mask = static_cast<const T*>(p.mask) + batch * p.strides[0] + head * p.strides[1];
  bool some = false;
  bool all = true;
  for (int i = threadIdx.x; i < p.tile_rows * per_row; i += static_cast<int>(blockDim.x)) {
    const int row = static_cast<int>(blockIdx.y) * p.tile_rows + i / per_row;
    const int word = static_cast<int>(blockIdx.x) * per_row + i % per_row;
    if (row >= p.rows) {
      break;
    }
    const int there = min(max(p.keys - word * 32, 0), 32);
    const unsigned full = there == 32 ? ~0u : (1u << there) - 1;
    if constexpr (sizeof(T) == 1) {
      const unsigned bits = word_of(mask + row * p.strides[2], p.strides[3], word * 32, p.keys);
      p.bits[(static_cast<long long>(blockIdx.z) * p.rows + row) * p.words + word] = bits;
      some |= bits != 0;
      all &= bits == full;
    } else {
      const uint2 bits = words_of(mask + row * p.strides[2], p.strides[3], word * 32, p.keys);
      some |= bits.x != 0;
      all &= bits.y == full;
    }
  }
  some = __syncthreads_or(some);
  all = __syncthreads_and(all);
  if (threadIdx.x == 0) {
    const long long at = (static_cast<long long>(blockIdx.z) * p.row_tiles + blockIdx.y) * p.key_tiles + blockIdx.x;
    p.states[at] = static_cast<unsigned char>(all ? 2 : some ? 1 : 0);
  }
}

}  // namespace mlx_cuda

extern "C" __global__ void __launch_bounds__(256) mask_states_bool(const __grid_constant__ mlx_cuda::MaskTilesParams params) {
  mlx_cuda::mask_states<unsigned char>(params);
}
extern "C" __global__ void __launch_bounds__(256) mask_states_float16(const __grid_constant__ mlx_cuda::MaskTilesParams params) {
  mlx_cuda::mask_states<__half>(params);
}
extern "C" __global__ void __launch_bounds__(256) mask_states_bfloat16(const __grid_constant__ mlx_cuda::MaskTilesParams params) {
  mlx_cuda::mask_states<__nv_bfloat16>(params);
}
extern "C" __global__ void __launch_bounds__(256) mask_states_float32(const __grid_constant__ mlx_cuda::MaskTilesParams params) {
  mlx_cuda::mask_states<float>(params);
}

// One warp for each tile of rows: the tiles of keys that are not hidden, in their order.
extern "C" __global__ void __launch_bounds__(32) mask_list(const __grid_constant__ mlx_cuda::MaskTilesParams p) {
  const long long row = (static_cast<long long>(blockIdx.z) * p.row_tiles + blockIdx.y);
  int count = 0;
  for (int first = 0; first < p.key_tiles; first += 32) {
    const int tile = first + static_cast<int>(threadIdx.x);
    const int state = tile < p.key_tiles ? p.states[row * p.key_tiles + tile] : 0;
    const unsigned kept = __ballot_sync(~0u, state != 0);
    if (state != 0) {
      const int before = __popc(kept & ((1u << threadIdx.x) - 1));
      p.tiles[row * p.key_tiles + count + before] = 2 * tile + (state == 2);
    }
    count += __popc(kept);
  }
  if (threadIdx.x == 0) {
    p.counts[row] = count;
  }
}
