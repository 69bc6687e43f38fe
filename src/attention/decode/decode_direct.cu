// Decoding where there is little to share out: a unit (batch entry and kv head) is cut into equal parts, a block for each.
//
// The ring of tiles of decode.cu pays where a multiprocessor has much to read. Here keys and values go from global memory straight
// into the fragments of mma.m16n8k16, without shared memory in between, and a block begins and ends sooner.
#include "attention/decode/results.cuh"
#include "attention/decode/tile.cuh"

namespace mlx_cuda {

[[maybe_unused]] constexpr int kTileKeys = 16;

// Block (part, kv head, batch entry), whose warps take tiles of 16 keys in turn. Masked: a bool mask of one row hides keys.
template <typename T, int D, bool Masked>
__device__ inline void direct(const DecodeParams& p) {
  constexpr int kLoads = D / 32;   // 16-byte loads of a row of K by a quad
  constexpr int kBlocks = D / 64;  // 64 columns of V
  const int threads = static_cast<int>(blockDim.x);
  const int lane = threadIdx.x % 32;
  const int slice = threadIdx.x / 32;
  const int slices = threads / 32;
  const int g = lane / 4;
  const int c = lane % 4;
  const int split = blockIdx.x;

  Segment s{};
  s.batch = blockIdx.z;
  s.kv_head = blockIdx.y;
  s.unit = s.batch * p.kv_heads + s.kv_head;
  s.slot = p.splits > 1 ? s.unit * p.splits + split : -1;
  s.rows = p.group * p.q_length;
  s.span = span_of(p, s.batch);
  s.first = s.span.begin / kTileKeys * kTileKeys + split * p.chunk;
  s.last = min(s.span.end, s.first + p.chunk);

  // A mask is read once, before the keys: tiles that it hides are never read.
  extern __shared__ uint4 memory[];
  unsigned* tile_bits = reinterpret_cast<unsigned*>(memory);  // [tile]: which of its keys are seen
  uint4* shared = memory + (Masked ? p.chunk / kTileKeys / 4 : 0);
  if constexpr (Masked) {
    const unsigned char* mask = static_cast<const unsigned char*>(p.mask) + s.batch * p.mask_strides[0];
    for (int index = threadIdx.x; index < (s.last - s.first + kTileKeys - 1) / kTileKeys; index += threads) {
      unsigned bits = 0;
      for (int i = 0; i < kTileKeys; ++i) {
        const int key = s.first + index * kTileKeys + i;
        if (key >= s.span.begin && key < s.last && mask[key * p.mask_strides[3]]) {
          bits |= 1u << i;
        }
      }
      tile_bits[index] = bits;
    }
  }
  // Q as fragments [step][lane]: the four words of a thread are adjacent.
  unsigned* q_words = reinterpret_cast<unsigned*>(shared);
  for (int index = threadIdx.x; index < kTileRows * (D / 8); index += threads) {
    const int row = index / (D / 8);
    const int column = index % (D / 8) * 8;
    uint4 value = make_uint4(0, 0, 0, 0);
    if (row < s.rows && column < p.head_dim) {
      const Row place = row_of(p, s, row);
      value = *reinterpret_cast<const uint4*>(
          static_cast<const T*>(p.q) + s.batch * p.q_strides.batch + place.head * p.q_strides.head + place.query * p.q_strides.row +
          column);
    }
    unsigned* to = q_words + (column / 32 * 2 * 32 + row % 8 * 4 + column / 8 % 4) * 4 + row / 8;
    to[0] = value.x;
    to[2] = value.y;
    to[32 * 4] = value.z;
    to[32 * 4 + 2] = value.w;
  }

  TileRows<T, D> rows;
  rows.clear();
  const T* k_head = static_cast<const T*>(p.k) + s.batch * p.k_strides.batch + s.kv_head * p.k_strides.head;
  const T* v_head = static_cast<const T*>(p.v) + s.batch * p.v_strides.batch + s.kv_head * p.v_strides.head;
  const uint4* my_q = shared + lane;

  uint4 keys[2][kLoads];
  auto load_keys = [&](int tile) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int key = tile + n * 8 + g;
      const bool there = key >= s.span.begin && key < s.last;
      const T* row = k_head + key * p.k_strides.row + c * 8;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        keys[n][i] = there && i * 32 + c * 8 < p.head_dim ? load16<false>(row + i * 32) : make_uint4(0, 0, 0, 0);
      }
    }
  };
  const int stride = slices * kTileKeys;
  auto seen_from = [&](int tile) {
    while (Masked && tile < s.last && tile_bits[(tile - s.first) / kTileKeys] == 0) {
      tile += stride;
    }
    return tile;
  };
  if constexpr (Masked) {
    __syncthreads();
  }
  int tile = seen_from(s.first + slice * kTileKeys);
  if (tile < s.last) {
    load_keys(tile);
  }
  __syncthreads();
  while (tile < s.last) {
    const int next = seen_from(tile + stride);
    float scores[2][4] = {};
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const uint4 q0 = my_q[2 * i * 32];
      const uint4 q1 = my_q[(2 * i + 1) * 32];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        mma(scores[n], q0, keys[n][i].x, keys[n][i].y, T{});
        mma(scores[n], q1, keys[n][i].z, keys[n][i].w, T{});
      }
    }
    uint4 values[kBlocks][4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int key = tile + 2 * c + (r & 1) + (r >> 1) * 8;
      const bool there = key >= s.span.begin && key < s.last;
      const T* row = v_head + key * p.v_strides.row + g * 8;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        values[b][r] = there && b * 64 + g * 8 < p.head_dim ? load16<false>(row + b * 64) : make_uint4(0, 0, 0, 0);
      }
    }
    if (next < s.last) {
      load_keys(next);
    }

    // Whether every row sees every key of this tile, as in nearly all of them.
    const unsigned bits = Masked ? tile_bits[(tile - s.first) / kTileKeys] : 0;
    const bool whole = Masked ? bits == 0xffff && p.scale > 0 : whole_tile(p, s, tile);
    // What this lane has: rows g (index 0, 1) and g + 8 (2, 3), keys 2c, 2c + 1 of each half tile.
    if (Masked && !whole) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float& score = scores[i / 4][i % 4];
        score = bits >> (i / 4 * 8 + 2 * c + i % 2) & 1 ? score * p.scale : -kInfinity;
      }
    } else if (!whole) {
      restrict_scores<T, 2>(p, s, scores, g, tile + 2 * c);
    }
    const uint4 weights = rows.weigh(scores, whole ? p.scale : 1.0f);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      rows.add(weights, b, values[b]);
    }
    tile = next;
  }

  // All slices write what they have, then all threads read.
  const unsigned long long ticket = read_ticket(p, s);
  __syncthreads();
  const int held = s.rows;
  float* results = reinterpret_cast<float*>(shared);
  float* scales = results + slices * held * rows.kPitch;
  rows.put(results, scales, slice, 0, held);
  __syncthreads();
  merge_slices<T, rows.kPitch>(p, s, results, scales, slices, held);
  if (s.slot >= 0) {
    merge_parts<T>(p, s, {p.splits, s.unit * p.splits, s.unit * p.splits, 1}, ticket, results);
  }
}

}  // namespace mlx_cuda

#if __CUDA_ARCH__ >= 800
#define MLX_CUDA_DIRECT_BODY(...) mlx_cuda::direct<__VA_ARGS__>(params);
#else
#define MLX_CUDA_DIRECT_BODY(...) __trap();  // never launched: mma.m16n8k16 needs sm_80
#endif

// `BLOCKS` blocks of 8 warps fit on a multiprocessor.
#define MLX_CUDA_DIRECT_KERNEL(name, BLOCKS, ...)                                                                         \
  extern "C" __global__ void __launch_bounds__(256, BLOCKS) name(const __grid_constant__ mlx_cuda::DecodeParams params) { \
    MLX_CUDA_DIRECT_BODY(__VA_ARGS__)                                                                                     \
  }

#define MLX_CUDA_DIRECT_ALL(dtype, T)                                \
  MLX_CUDA_DIRECT_KERNEL(direct_##dtype##_64, 2, T, 64, false)       \
  MLX_CUDA_DIRECT_KERNEL(direct_##dtype##_64_masked, 2, T, 64, true) \
  MLX_CUDA_DIRECT_KERNEL(direct_##dtype##_128, 1, T, 128, false)     \
  MLX_CUDA_DIRECT_KERNEL(direct_##dtype##_128_masked, 1, T, 128, true)

MLX_CUDA_DIRECT_ALL(float16, __half)
MLX_CUDA_DIRECT_ALL(bfloat16, __nv_bfloat16)
