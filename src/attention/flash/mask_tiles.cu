// Reads a mask of attention once: which tiles are fully masked and which not at all, and for a bool mask its bits.
//
// The flash kernels then skip fully masked tiles, and read an eighth of a bool mask's bytes. A large common offset of a row of an
// additive mask is subtracted: added to the scores it would overflow, or swallow them.
#include "attention/flash/mask_tiles_params.h"

#include "device/kernel.cuh"
#include "device/numbers.cuh"
#include "device/vector.cuh"

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

// Statistics of some numbers of an additive mask.
struct Seen {
  float peak = -kInfinity;
  bool hidden = true;
  bool zeros = true;

  __device__ void add(float bias) {
    peak = fmaxf(peak, bias);      // NaN makes its row NaN, whatever is taken off that
    hidden &= bias == -kInfinity;  // NaN is not
    zeros &= bias == 0;
  }
};

// Reads the keys of a row that belong to one of its four lanes: 16 of each 64 bytes, if the row is aligned.
template <typename T>
__device__ inline Seen look(const T* row, long long stride, int key0, int count, int keys) {
  constexpr int per_lane = kVectorSize<T>;
  const int lane = static_cast<int>(threadIdx.x) % 4;
  Seen seen;
  const bool aligned = stride == 1 && key0 + count <= keys && reinterpret_cast<unsigned long long>(row + key0) % 16 == 0;
  if (aligned) {
#pragma unroll 4
    for (int key = key0 + lane * per_lane; key < key0 + count; key += 4 * per_lane) {
      const auto some = *reinterpret_cast<const Vector<T, per_lane>*>(row + key);
#pragma unroll
      for (int i = 0; i < per_lane; ++i) {
        seen.add(to_float(some.value[i]));
      }
    }
  } else {
    for (int key = key0 + lane; key < min(key0 + count, keys); key += 4) {
      seen.add(to_float(row[key * stride]));
    }
  }
  return seen;
}

// Block (tile of keys, tile of rows, batch entry and head).
__device__ inline void mask_states_bool(const MaskTilesParams& p, const unsigned char* mask, bool& some, bool& all) {
  const int per_row = p.tile_keys / 32;
  for (int i = threadIdx.x; i < p.tile_rows * per_row; i += static_cast<int>(blockDim.x)) {
    const int row = static_cast<int>(blockIdx.y) * p.tile_rows + i / per_row;
    const int word = static_cast<int>(blockIdx.x) * per_row + i % per_row;
    if (row >= p.rows) {
      break;
    }
    const int there = min(max(p.keys - word * 32, 0), 32);
    const unsigned full = there == 32 ? ~0u : (1u << there) - 1;
    const unsigned bits = word_of(mask + row * p.strides[2], p.strides[3], word * 32, p.keys);
    p.bits[(static_cast<long long>(blockIdx.z) * p.rows + row) * p.words + word] = bits;
    some |= bits != 0;
    all &= bits == full;
  }
}

template <typename T>
__device__ inline void mask_states_additive(const MaskTilesParams& p, const T* mask, bool& some, bool& all) {
  const int rows = min(p.tile_rows, p.rows - static_cast<int>(blockIdx.y) * p.tile_rows);
  const int key0 = static_cast<int>(blockIdx.x) * p.tile_keys;
  const int thread = static_cast<int>(threadIdx.x);
  for (int first = thread / 32 * 8; first < rows; first += static_cast<int>(blockDim.x) / 4) {  // of a warp
    const int i = first + thread % 32 / 4;
    const int row = static_cast<int>(blockIdx.y) * p.tile_rows + min(i, rows - 1);
    Seen seen = look(mask + row * p.strides[2], p.strides[3], key0, p.tile_keys, p.keys);
    some |= !seen.hidden;
    all &= seen.zeros;
    seen.peak = fmaxf(seen.peak, __shfl_xor_sync(~0u, seen.peak, 1));
    seen.peak = fmaxf(seen.peak, __shfl_xor_sync(~0u, seen.peak, 2));
    if (p.shifts && i < rows && thread % 4 == 0) {
      p.peaks[(static_cast<long long>(blockIdx.z) * p.key_tiles + blockIdx.x) * p.rows + row] = seen.peak;
    }
  }
}

template <typename T>
__device__ inline void mask_states(const MaskTilesParams& p) {
  const int batch = blockIdx.z / p.heads;
  const int head = blockIdx.z % p.heads;
  const T* mask = static_cast<const T*>(p.mask) + batch * p.strides[0] + head * p.strides[1];
  bool some = false;
  bool all = true;
  if constexpr (sizeof(T) == 1) {
    mask_states_bool(p, mask, some, all);
  } else {
    mask_states_additive(p, mask, some, all);
  }
  some = __syncthreads_or(some);
  all = __syncthreads_and(all);
  if (threadIdx.x == 0) {
    const long long at = (static_cast<long long>(blockIdx.z) * p.row_tiles + blockIdx.y) * p.key_tiles + blockIdx.x;
    p.states[at] = static_cast<unsigned char>(all ? 2 : some ? 1 : 0);
  }
}

#define MLX_CUDA_MASK_STATES(name, T, dtype) MLX_CUDA_KERNEL(name, (256), MaskTilesParams, mask_states<T>)
MLX_CUDA_MASK_STATES_KERNELS(MLX_CUDA_MASK_STATES)

// For each tile of rows: the tiles of keys that are not fully masked, in their order, and the offsets of the rows.
extern "C" __global__ void __launch_bounds__(128) mask_list(const __grid_constant__ MaskTilesParams p) {
  constexpr float kModest = 1024;  // what leaves enough of the scores' digits
  bool shifted = false;
  if (p.shifts) {
    const int end = min((static_cast<int>(blockIdx.y) + 1) * p.tile_rows, p.rows);
    for (int i = static_cast<int>(blockIdx.y) * p.tile_rows + static_cast<int>(threadIdx.x); i < end; i += 128) {
      const float* peaks = p.peaks + static_cast<long long>(blockIdx.z) * p.key_tiles * p.rows + i;
      float peak = -kInfinity;
#pragma unroll 8
      for (int tile = 0; tile < p.key_tiles; ++tile) {
        peak = fmaxf(peak, peaks[static_cast<long long>(tile) * p.rows]);
      }
      const float size = fabsf(peak);
      const bool large = size > kModest && size < kInfinity;
      p.shifts[static_cast<long long>(blockIdx.z) * p.rows + i] = large ? peak : 0;
      shifted |= large;
    }
  }
  shifted = __syncthreads_or(shifted);  // then no tile is as it would be without a mask
  if (threadIdx.x >= 32) {
    return;
  }
  const long long row = (static_cast<long long>(blockIdx.z) * p.row_tiles + blockIdx.y);
  int count = 0;
  for (int first = 0; first < p.key_tiles; first += 32) {
    const int tile = first + static_cast<int>(threadIdx.x);
    const int state = tile < p.key_tiles ? p.states[row * p.key_tiles + tile] : 0;
    const unsigned kept = __ballot_sync(~0u, state != 0);
    if (state != 0) {
      const int before = __popc(kept & ((1u << threadIdx.x) - 1));
      p.tiles[row * p.key_tiles + count + before] = 2 * tile + (state == 2 && !shifted);
    }
    count += __popc(kept);
  }
  if (threadIdx.x == 0) {
    p.counts[row] = count;
  }
}

}  // namespace mlx_cuda
