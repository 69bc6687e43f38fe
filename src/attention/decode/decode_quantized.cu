// Decoding from keys and values in MLX's quantised formats, by split-K: they are read once, as they are packed, and become
// fragments of mma.m16n8k16 in registers, bit for bit the values of mx.dequantize.
//
// A lane takes 4 to 16 adjacent bytes of a row. Which columns these are is free on both sides: queries are put into the same order
// in shared memory, and results are put back from theirs.
#include "attention/decode/quantized_params.h"
#include "attention/decode/split.cuh"
#include "attention/decode/tile.cuh"
#include "device/grid.cuh"
#include "matmul/quantized/factors.cuh"

namespace mlx_cuda {

// Numbers of 4 bits (mxfp4 and nvfp4) or of 8 (mxfp8).
template <int Bits>
struct Floats {
  static constexpr int kBits = Bits;
  static constexpr bool kBiased = false;
};

// Bytes of a row that a lane takes at once, a chunk, and the scales of its groups: one, or two of 16 values each (nvfp4).
template <typename Format, int Bytes>
struct Chunk {
  static constexpr int kValues = Bytes * 8 / Format::kBits;
  static constexpr int kPieces = kValues / 8;

  unsigned words[Bytes / 4];
  unsigned short scale;
  unsigned short second;  // scale, or the bias

  __device__ void load(const QuantizedOperand& of, const char* row, const char* scales) {
    stream<false, Bytes / 4>(words, row);
    if constexpr (Format::kBiased) {
      scale = __ldg(reinterpret_cast<const unsigned short*>(scales));
      second = __ldg(reinterpret_cast<const unsigned short*>(scales + of.biases_after));
    } else {
      scale = __ldg(reinterpret_cast<const unsigned char*>(scales));
      if (kValues > 16 && of.nvfp4) {
        second = __ldg(reinterpret_cast<const unsigned char*>(scales) + 1);
      }
    }
  }
};

// Four pairs of T from 8 values of four bits, (0 4) (1 5) (2 6) (3 7), or of eight, (0 1) (2 3) (4 5) (6 7).
template <typename T, typename Format, int Bytes>
__device__ inline void values_of(bool nvfp4, const Chunk<Format, Bytes>& chunk, int piece, unsigned (&pairs)[4]) {
  constexpr int bits = Format::kBits;
  const uint2 packed = make_uint2(chunk.words[piece * bits / 4], bits == 8 ? chunk.words[piece * 2 + 1] : 0);
  if constexpr (Format::kBiased) {
    unpack<Format, T>(packed, pairs);
    scale_pairs<T>(pairs, __byte_perm(chunk.scale, 0, 0x1010), __byte_perm(chunk.second, 0, 0x1010));
  } else {
    constexpr float raise = bits == 4 ? (kRaised<T> ? 0x1p126f : 1.0f) : 0x1p120f;
    float factor;
    if constexpr (bits == 4) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        pairs[i] = fp4_pair(i < 2 ? packed.x : packed.x >> 8, i % 2 * 4, T{});
      }
      factor = nvfp4 ? from_e4m3(piece % 4 < 2 ? chunk.scale : chunk.second) : from_e8m0(chunk.scale);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const unsigned two = __byte_perm(i < 2 ? packed.x : packed.y, 0, i % 2 ? 0x4342 : 0x4140);
        pairs[i] = (two << 8 & 0x80008000u) | (two << 4 & 0x07f007f0u);
      }
      factor = fp8_nans(packed.x) | fp8_nans(packed.y) ? __uint_as_float(0x7fc00000u) : from_e8m0(chunk.scale);
    }
    const unsigned twice = pack(factor, factor, T{});
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // together with the scale this may be more than there are numbers for
      if (raise != 1.0f) {
        pairs[i] = as_bits(__hmul2(as_pair<T>(pairs[i]), as_pair<T>(pack(raise, raise, T{}))));
      }
      pairs[i] = as_bits(__hmul2(as_pair<T>(pairs[i]), as_pair<T>(twice)));
    }
  }
}

// Eight values of a query as the same pairs.
template <int Bits>
__device__ inline uint4 as_pairs(const uint4& v) {
  if constexpr (Bits == 8) {
    return v;
  } else {
    return make_uint4(
        __byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632), __byte_perm(v.y, v.w, 0x5410), __byte_perm(v.y, v.w, 0x7632));
  }
}

// Where a lane's chunks of the rows of a kv head are: `Chunks` of each row, `Lanes` chunks apart. In place of what lies beyond the
// last column the first is read: it meets zeros, or is not written.
template <typename Format, int Bytes, int Chunks, int Lanes>
struct PackedHead {
  using C = Chunk<Format, Bytes>;

  const QuantizedOperand& of;
  const char* rows;  // at the first chunk
  const char* scales;
  int columns;
  int lane;

  __device__ PackedHead(const QuantizedOperand& of, int columns, int lane) : of(of), columns(columns), lane(lane) {}

  __device__ int column(int chunk) const {
    const int column = (chunk * Lanes + lane) * C::kValues;
    return column < columns ? column : 0;
  }
  __device__ int scale_at(int chunk) const {
    return (column(chunk) >> of.group_shift) * (Format::kBiased ? 2 : 1);
  }

  // Turns to a batch entry or a page.
  __device__ void turn_to(int outer, int head) {
    rows = static_cast<const char*>(of.rows) + outer * of.row_strides.batch + head * of.row_strides.head +
           column(0) * Format::kBits / 8;
    scales = static_cast<const char*>(of.scales) + outer * of.scale_strides.batch + head * of.scale_strides.head + scale_at(0);
  }

  // A row some steps after another.
  __device__ void load(C (&to)[Chunks], int row, int steps) const {
    const char* packed =
        rows + static_cast<long long>(row) * of.row_strides.row + static_cast<long long>(steps) * of.row_strides.row;
    const char* scale =
        scales + static_cast<long long>(row) * of.scale_strides.row + static_cast<long long>(steps) * of.scale_strides.row;
#pragma unroll
    for (int i = 0; i < Chunks; ++i) {
      to[i].load(of, packed + (column(i) - column(0)) * Format::kBits / 8, scale + (scale_at(i) - scale_at(0)));
    }
  }
};

template <typename T, int D, typename Format>
struct QuantizedTiles {
  static constexpr int Bits = Format::kBits;
  static constexpr QuantizedTraits kTraits{D, Bits};
  using KeyChunk = Chunk<Format, kTraits.key_bytes()>;
  using ValueChunk = Chunk<Format, kTraits.value_bytes()>;
  static constexpr int kKeyChunks = D / 4 / KeyChunk::kValues;
  static constexpr int kValueChunks = D / 8 / ValueChunk::kValues;
  using Rows = TileRows<T, D, ValueChunk::kValues>;

  const QuantizedParams& p;
  const Segment& s;
  PackedHead<Format, kTraits.key_bytes(), kKeyChunks, 4> key_head;
  PackedHead<Format, kTraits.value_bytes(), kValueChunks, 8> value_head;
  int shift = 0;  // from the number of a key to its row, in the page of the tile that is loaded next
  KeyChunk keys[2][kKeyChunks];
  ValueChunk values[4][kValueChunks];

  __device__ QuantizedTiles(const QuantizedParams& p, const Segment& s)
      : p(p), s(s), key_head(p.keys, p.head_dim, threadIdx.x % 4), value_head(p.values, p.value_dim, threadIdx.x % 32 / 4) {
    turn_to(s.batch);
  }

  __device__ void turn_to(int outer) {
    key_head.turn_to(outer, s.kv_head);
    value_head.turn_to(outer, s.kv_head);
  }

  // A tile lies in one page.
  __device__ void look_up(int tile) {
    if (p.table && tile < s.last) {
      const int number = tile / p.page_size;
      turn_to(__ldg(p.table + s.batch * p.table_stride + number));
      shift = -number * p.page_size;
    }
  }

  // Of keys that are not there, the nearest one that is: nobody sees its score.
  __device__ int key_of(int key) const {
    return max(min(key, s.last - 1), s.span.begin);
  }

  // Loads row `first` of a tile, and those `steps` after it.
  template <int Rows, typename Head, typename C, int Chunks>
  __device__ void load(const Head& head, C (&to)[Rows][Chunks], int tile, int first, const int (&steps)[Rows]) const {
    const int key = tile + first;
    if (tile >= s.span.begin && tile + QuantizedTraits::kTileKeys <= s.last) {
#pragma unroll
      for (int r = 0; r < Rows; ++r) {
        head.load(to[r], key + shift, steps[r]);
      }
    } else {
#pragma unroll
      for (int r = 0; r < Rows; ++r) {
        head.load(to[r], key_of(key + steps[r]) + shift, 0);
      }
    }
  }

  __device__ void load_keys(int tile) {
    load(key_head, keys, tile, static_cast<int>(threadIdx.x) % 32 / 4, {0, 8});
  }

  __device__ void load_values(int tile) {
    load(value_head, values, tile, value_key(0), {0, 1, 8, 9});
  }

  // Queries as fragments, [step of 16 columns][lane], in the order of the keys' pairs; by all threads of the block.
  static __device__ void share(const DecodeParams& p, const Segment& s, uint4* to) {
    unsigned* words = reinterpret_cast<unsigned*>(to);
    constexpr int chunk = KeyChunk::kValues;
    for (int index = threadIdx.x; index < kTileRows * (D / 8); index += static_cast<int>(blockDim.x)) {
      const int row = index / (D / 8);
      const int column = index % (D / 8) * 8;
      const uint4 pairs = as_pairs<Bits>(query_piece<T>(p, s, row, column));
      const int step = (column / (4 * chunk) * (chunk / 8) + column % chunk / 8) * 2;
      unsigned* at = words + (step * 32 + row % 8 * 4 + column / chunk % 4) * 4 + row / 8;
      at[0] = pairs.x;
      at[2] = pairs.y;
      at[32 * 4] = pairs.z;
      at[32 * 4 + 2] = pairs.w;
    }
  }

  __device__ void score(float (&scores)[2][4], const uint4* queries) const {
#pragma unroll
    for (int i = 0; i < kKeyChunks; ++i) {
      if (i * 4 * KeyChunk::kValues < p.head_dim) {
#pragma unroll
        for (int w = 0; w < KeyChunk::kPieces; ++w) {
          const uint4* q = queries + (i * KeyChunk::kPieces + w) * 2 * 32;
          const uint4 q0 = q[0];
          const uint4 q1 = q[32];
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            unsigned pairs[4];
            values_of<T>(p.keys.nvfp4, keys[n][i], w, pairs);
            mma(scores[n], q0, pairs[0], pairs[1], T{});
            mma(scores[n], q1, pairs[2], pairs[3], T{});
          }
        }
      }
    }
  }

  __device__ void add(Rows& rows, const uint4& weights) const {
#pragma unroll
    for (int i = 0; i < kValueChunks; ++i) {
      if (i * 8 * ValueChunk::kValues < p.value_dim) {
#pragma unroll
        for (int w = 0; w < ValueChunk::kPieces; ++w) {
          unsigned pairs[4][4];
#pragma unroll
          for (int r = 0; r < 4; ++r) {
            values_of<T>(p.values.nvfp4, values[r][i], w, pairs[r]);
          }
#pragma unroll
          for (int j = 0; j < 8; ++j) {  // a column of each lane
            const int pair = Bits == 4 ? j % 4 : j / 2;
            const unsigned half = (Bits == 4 ? j / 4 : j % 2) ? 0x7632 : 0x5410;
            mma(rows.acc[i * ValueChunk::kPieces + w][j], weights, __byte_perm(pairs[0][pair], pairs[1][pair], half),
                __byte_perm(pairs[2][pair], pairs[3][pair], half), T{});
          }
        }
      }
    }
  }
};

template <typename T, int D, typename Format>
__device__ inline void decode_quantized(const QuantizedParams& p) {
  using Tiles = QuantizedTiles<T, D, Format>;
  begin_early();
  const Segment s = part_of_unit<true>(p);
  const int parts = parts_of_unit(p, s.span);
  if (static_cast<int>(blockIdx.x) >= parts) {
    return;
  }
  const int slice = threadIdx.x / 32;
  const int slices = static_cast<int>(blockDim.x) / 32;
  const int stride = slices * QuantizedTraits::kTileKeys;
  extern __shared__ uint4 memory[];
  int tile = s.first + slice * QuantizedTraits::kTileKeys;
  Tiles tiles(p, s);
  tiles.look_up(tile);
  if (tile < s.last) {
    tiles.load_keys(tile);
    tiles.load_values(tile);
  }
  tiles.look_up(tile + stride);
  Tiles::share(p, s, memory);
  typename Tiles::Rows rows;
  rows.clear();
  __syncthreads();
  while (tile < s.last) {
    const int next = tile + stride;
    float scores[2][4] = {};
    tiles.score(scores, memory + threadIdx.x % 32);
    if (next < s.last) {
      tiles.load_keys(next);
    }
    const float unit = restrict_tile<T, 2>(p, s, scores, static_cast<int>(threadIdx.x) % 32 / 4, tile);
    const uint4 weights = rows.weigh(scores, unit);
    tiles.add(rows, weights);
    if (next < s.last) {
      tiles.load_values(next);
    }
    tiles.look_up(next + stride);
    tile = next;
  }

  const unsigned long long ticket = read_ticket(p, s);
  float* results = reinterpret_cast<float*>(memory);
  rows.write(p, s, results, slice, slices, 0, s.rows);
  if (s.slot >= 0) {
    merge_parts<T>(p, s, {parts, s.unit * p.split_k.splits, s.unit * p.split_k.splits, 1}, ticket, results);
  }
}

}  // namespace mlx_cuda

#define MLX_CUDA_QUANTIZED(dtype, T, D, name, FORMAT)                                              \
  extern "C" __global__ void __launch_bounds__(                                                    \
      mlx_cuda::QuantizedTraits{D, mlx_cuda::FORMAT::kBits}.most_warps() * 32,                     \
      mlx_cuda::QuantizedTraits{D, mlx_cuda::FORMAT::kBits}.resident_blocks())                     \
      quantized_##dtype##_##D##_##name(const __grid_constant__ mlx_cuda::QuantizedParams params) { \
    MLX_CUDA_SM80(mlx_cuda::decode_quantized<T, D, mlx_cuda::FORMAT>(params))                      \
  }

#define MLX_CUDA_QUANTIZED_ALL(dtype, T)                \
  MLX_CUDA_QUANTIZED(dtype, T, 128, affine4, Affine<4>) \
  MLX_CUDA_QUANTIZED(dtype, T, 128, affine8, Affine<8>) \
  MLX_CUDA_QUANTIZED(dtype, T, 256, affine4, Affine<4>) \
  MLX_CUDA_QUANTIZED(dtype, T, 256, affine8, Affine<8>) \
  MLX_CUDA_QUANTIZED(dtype, T, 128, floats4, Floats<4>) \
  MLX_CUDA_QUANTIZED(dtype, T, 256, floats4, Floats<4>)

MLX_CUDA_QUANTIZED_ALL(float16, __half)
MLX_CUDA_QUANTIZED_ALL(bfloat16, __nv_bfloat16)
// float16 holds few of mxfp8's scales.
MLX_CUDA_QUANTIZED(bfloat16, __nv_bfloat16, 128, floats8, Floats<8>)
MLX_CUDA_QUANTIZED(bfloat16, __nv_bfloat16, 256, floats8, Floats<8>)
