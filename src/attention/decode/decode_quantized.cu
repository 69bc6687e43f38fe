// Decoding with a quantized KV cache, split-K: keys and values are read once, packed, and become fragments of mma.m16n8k16 in
// registers, rounded as by mx.dequantize.
//
// M of the MMA is keys, or columns of values, and N is up to eight queries: S^T = K Q^T, O^T = V^T P^T. A lane loads 4 to 16
// adjacent bytes of a row, whatever columns these are: queries are permuted to match, and results permuted back.
#include "attention/decode/kernels.h"
#include "attention/decode/quantized_params.h"
#include "attention/decode/results.cuh"
#include "attention/decode/split.cuh"
#include "device/ptx.cuh"
#include "device/reduce.cuh"
#include "device/types.cuh"
#include "matmul/quantized/factors.cuh"

namespace mlx_cuda {

// Bytes of a row that a lane takes at once, a chunk, and the scales of its groups: one, or two of 16 values each (nvfp4). Mxfp4
// stands for nvfp4 too: a call says which it is.
template <typename Format, int Bytes>
struct Chunk {
  static constexpr int kValues = Bytes * 8 / Format::kBits;
  static constexpr int kPieces = kValues / 8;

  unsigned words[Bytes / 4];
  unsigned short scale;
  unsigned short second;  // scale, or the bias

  // The scale of a piece as a factor of floats; NaN where a value of the chunk is.
  template <typename T>
  __device__ float factor(int piece, bool nvfp4) const {
    unsigned nans = 0;
#pragma unroll
    for (int i = 0; Format::kBits == 8 && i < Bytes / 4; ++i) {
      nans |= fp8_nans(words[i]);
    }
    const unsigned byte = kValues > 16 && nvfp4 && piece >= 2 ? second : scale;
    // e8m0 without its extremes, 2^-127 and NaN, which would need a branch: no quantized tensor has such scales.
    const float value = nvfp4 ? from_e4m3(byte) : __uint_as_float(byte << 23);
    return kScaleFactor<Format, T> * (nans ? __uint_as_float(0x7fc00000u) : value);
  }
};

// The factors of the values of two chunks (factors.cuh): those of `low` in the lower halves. For one chunk, pass it twice.
template <typename T, typename Format, int Bytes>
__device__ inline Factors<Format, T> factors_of(const Chunk<Format, Bytes>& low, const Chunk<Format, Bytes>& high, bool nvfp4) {
  Factors<Format, T> out;
  if constexpr (Format::kBiased) {
    out.first = scaled_pair<0>(__byte_perm(low.scale, high.scale, 0x5410), T{});
    out.second = scaled_pair<1>(__byte_perm(low.second, high.second, 0x5410), T{});
  } else {
    out.first = pack(low.template factor<T>(0, nvfp4), high.template factor<T>(0, nvfp4), T{});
    out.second = pack(low.template factor<T>(2, nvfp4), high.template factor<T>(2, nvfp4), T{});
  }
  return out;
}

// Four columns of two keys as pairs, (first, second) each: those from `quad` * 4 on.
template <typename T, typename Format, int Bytes>
__device__ inline void weights_of(
    const Factors<Format, T>& factors,
    const Chunk<Format, Bytes>& first,
    const Chunk<Format, Bytes>& second,
    int quad,
    unsigned (&to)[4]) {
  if constexpr (Format::kBits == 4) {
    const unsigned both[1] = {__byte_perm(first.words[quad / 2], second.words[quad / 2], quad % 2 == 0 ? 0x5410 : 0x7632)};
    Factors<Format, T> own = factors;
    if (!Format::kBiased && quad >= 4) {
      own.first = own.second;
    }
    own.weights(both, 0, to);
  } else {
    constexpr bool adjacent = kFactorsApart<Format> == 1;
    const unsigned both[2] = {
        __byte_perm(first.words[quad], second.words[quad], adjacent ? 0x5140 : 0x5410),
        __byte_perm(first.words[quad], second.words[quad], adjacent ? 0x7362 : 0x7632)};
    factors.weights(both, 0, to);
  }
}

// The position of a lane's chunks in the rows of a kv head: `Chunks` of each row, `Lanes` chunks apart. Beyond the last column,
// the first one is read: it is multiplied by zeros, or not written.
template <typename Format, int Bytes, int Chunks, int Lanes>
struct PackedHead {
  using C = Chunk<Format, Bytes>;

  const QuantizedOperand& of;
  const char* rows;  // at the first chunk
  const char* scales;
  const char* biases;
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
    biases = scales + of.biases_after;
  }

  __device__ void load(C (&to)[Chunks], int row) const {
    const char* packed = rows + static_cast<long long>(row) * of.row_strides.row;
    const char* scale = scales + static_cast<long long>(row) * of.scale_strides.row;
    const char* bias = biases + static_cast<long long>(row) * of.scale_strides.row;
#pragma unroll
    for (int i = 0; i < Chunks; ++i) {
      const int at = scale_at(i) - scale_at(0);
      stream<false, Bytes / 4>(to[i].words, packed + (column(i) - column(0)) * Format::kBits / 8);
      if constexpr (Format::kBiased) {
        to[i].scale = __ldg(reinterpret_cast<const unsigned short*>(scale + at));
        to[i].second = __ldg(reinterpret_cast<const unsigned short*>(bias + at));
      } else {
        to[i].scale = __ldg(reinterpret_cast<const unsigned char*>(scale + at));
        if (C::kValues > 16 && of.nvfp4) {
          to[i].second = __ldg(reinterpret_cast<const unsigned char*>(scale + at) + 1);
        }
      }
    }
  }
};

// A unit, or a part of one, as a warp computes it. Lane 4 * g + c has keys g and g + 8 of a tile and queries 2c and 2c + 1.
template <typename T, int D, typename Format>
struct QuantizedUnit {
  static constexpr QuantizedTraits kTraits{D, Format::kBits};
  static constexpr int kRows = QuantizedTraits::kRows;
  static constexpr int kPitch = result_pitch(D);
  static constexpr float kSlack = 8;  // powers of two by which a weight may be above 1 before all sums shrink
  static constexpr float kFactor = kResultFactor<Format, T>;  // of all that is computed from factors
  using KeyChunk = Chunk<Format, kTraits.key_bytes()>;
  using ValueChunk = Chunk<Format, kTraits.value_bytes()>;
  static constexpr int kKeyChunks = D / 4 / KeyChunk::kValues;
  static constexpr int kValueChunks = D / 8 / ValueChunk::kValues;

  const QuantizedParams& p;
  const Segment& s;
  const int g = kept(threadIdx.x % 32 / 4);
  const int c = kept(threadIdx.x % 4);
  PackedHead<Format, kTraits.key_bytes(), kKeyChunks, 4> key_head;
  PackedHead<Format, kTraits.value_bytes(), kValueChunks, 8> value_head;
  int shift = 0;   // from the number of a key to its row, in the page of the tile that is loaded next
  int whole_from;  // the first and the last tile that all queries see whole
  int whole_to;
  KeyChunk keys[2][kKeyChunks];
  ValueChunk values[4][kValueChunks];  // of keys 2c, 2c + 1, 2c + 8 and 2c + 9
  int queries;                         // fragments [piece of a lane's row][lane], where they are in shared memory
  float acc[D / 16][4];                // column `column_of(i)` of queries 2c and 2c + 1, and the one after it
  float peak[2] = {-kInfinity, -kInfinity};
  float sum[2] = {0, 0};  // of this lane's keys

  __device__ QuantizedUnit(const QuantizedParams& p, const Segment& s)
      : p(p), s(s), key_head(p.keys, p.head_dim, c), value_head(p.values, p.value_dim, g) {
    turn_to(s.batch);
    whole_from = p.window_left < 0 ? s.span.begin : max(s.span.begin, s.span.end - 1 - p.window_left);
    whole_to = (p.window_right < 0 ? s.last : min(s.last, s.span.diagonal + p.window_right + 1)) - QuantizedTraits::kTileKeys;
    whole_to = p.plain ? whole_to : -1;
#pragma unroll
    for (auto& tile : acc) {
      tile[0] = tile[1] = tile[2] = tile[3] = 0;
    }
  }

  __device__ void turn_to(int outer) {
    key_head.turn_to(outer, s.kv_head);
    value_head.turn_to(outer, s.kv_head);
  }

  // A tile is in one page; tiles after the last have the page of the last key.
  __device__ void look_up(int tile) {
    if (p.table) {
      const int number = min(tile, s.last - 1) / p.page_size;
      turn_to(__ldg(p.table + s.batch * p.table_stride + number));
      shift = -number * p.page_size;
    }
  }

  // The row of a key, clamped to the existing ones: the score of a clamped row is never used, and the last tiles need no branch.
  __device__ int row_of_key(int key) const {
    return max(min(key, s.last - 1), s.span.begin) + shift;
  }

  __device__ void load_keys(int tile) {
    key_head.load(keys[0], row_of_key(tile + g));
    key_head.load(keys[1], row_of_key(tile + g + 8));
  }

  __device__ void load_values(int tile) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      value_head.load(values[r], row_of_key(tile + 2 * c + r % 2 + r / 2 * 8));
    }
  }

  // Puts the fragments of the block's queries into shared memory; its warps take turns.
  __device__ void share_queries(uint4* to, int warp, int warps) {
    for (int i = warp; i < D / 32; i += warps) {
      const int chunk = i / KeyChunk::kPieces;
      const int column = (chunk * 4 + c) * KeyChunk::kValues + i % KeyChunk::kPieces * 8;
      to[i * 32 + threadIdx.x % 32] = order_pairs<Format>(query_piece<T>(p, s, g, column), 0);
    }
    queries = kept(static_cast<int>(__cvta_generic_to_shared(to + threadIdx.x % 32)));
    __syncthreads();
  }

  __device__ void score(float (&scores)[4]) const {
    float second[4] = {};  // two accumulators, for independent MMAs
#pragma unroll
    for (int i = 0; i < kKeyChunks; ++i) {
      if (i == 0 || i * 4 * KeyChunk::kValues < p.head_dim) {
        const Factors<Format, T> low = factors_of<T>(keys[0][i], keys[0][i], p.keys.nvfp4);
        const Factors<Format, T> high = factors_of<T>(keys[1][i], keys[1][i], p.keys.nvfp4);
#pragma unroll
        for (int w = 0; w < KeyChunk::kPieces; ++w) {
          unsigned a[4];
          unsigned b[4];
          low.weights(keys[0][i].words, w, a);
          high.weights(keys[1][i].words, w, b);
          const uint4 q = load16_shared(queries + (i * KeyChunk::kPieces + w) * 512);
          mma(scores, make_uint4(a[0], b[0], a[1], b[1]), q.x, q.y, T{});
          mma(second, make_uint4(a[2], b[2], a[3], b[3]), q.z, q.w, T{});
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scores[i] += second[i];
    }
  }

  // Scores with masks, bias or softcap, in units of log2(e). A loop, because it is rare.
  __device__ void restrict_scores(float (&scores)[4], int tile) const {
    float staged[4] = {scores[0], scores[1], scores[2], scores[3]};
#pragma unroll 1
    for (int i = 0; i < 4; ++i) {
      const int row = 2 * c + i % 2;
      staged[i] = restricted<T>(p, s, staged[i] * kFactor, row_of(p, s, row), row < s.rows, tile + g + i / 2 * 8);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scores[i] = staged[i];
    }
  }

  // Makes weights of the scores, as the fragment of P^T.
  __device__ uint2 weigh(float (&scores)[4], int tile) {
    float unit = p.scale * kFactor;
    if (tile < whole_from || tile > whole_to) {
      restrict_scores(scores, tile);
      unit = 1;
    }
    const float top[2] = {nan_max(scores[0], scores[2]) * unit, nan_max(scores[1], scores[3]) * unit};
    if (__any_sync(~0u, top[0] > peak[0] + kSlack || top[1] > peak[1] + kSlack)) {
      raise(top);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scores[i] = exp2_approx(fmaf(scores[i], unit, peak[i % 2] == -kInfinity ? 0.0f : -peak[i % 2]));
    }
    sum[0] += scores[0] + scores[2];
    sum[1] += scores[1] + scores[3];
    return make_uint2(transposed(pack(scores[0], scores[1], T{})), transposed(pack(scores[2], scores[3], T{})));
  }

  __device__ void raise(const float (&top)[2]) {
    float shrink[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float higher = nan_max(peak[i], of_near_lanes<4, 32>(top[i], NanMax{}));
      shrink[i] = shrinking(peak[i], higher);
      peak[i] = higher;
      sum[i] *= shrink[i];
    }
#pragma unroll
    for (auto& tile : acc) {
      tile[0] *= shrink[0];
      tile[1] *= shrink[1];
      tile[2] *= shrink[0];
      tile[3] *= shrink[1];
    }
  }

  __device__ void add(const uint2& weights) {
#pragma unroll
    for (int i = 0; i < kValueChunks; ++i) {
      if (i == 0 || i * 8 * ValueChunk::kValues < p.value_dim) {
        const Factors<Format, T> low = factors_of<T>(values[0][i], values[1][i], p.values.nvfp4);
        const Factors<Format, T> high = factors_of<T>(values[2][i], values[3][i], p.values.nvfp4);
#pragma unroll
        for (int quad = 0; quad < ValueChunk::kValues / 4; ++quad) {
          unsigned a[4];
          unsigned b[4];
          weights_of(low, values[0][i], values[1][i], quad, a);
          weights_of(high, values[2][i], values[3][i], quad, b);
          float (*to)[4] = acc + i * ValueChunk::kValues / 2 + quad * 2;
          mma(to[0], make_uint4(a[0], a[1], b[0], b[1]), weights.x, weights.y, T{});
          mma(to[1], make_uint4(a[2], a[3], b[2], b[3]), weights.x, weights.y, T{});
        }
      }
    }
  }

  // The first of two adjacent columns of values that an accumulator has.
  __device__ int column_of(int tile) const {
    constexpr int chunk = ValueChunk::kValues / 2;  // accumulators
    return (tile / chunk * 8 + g) * ValueChunk::kValues + tile % chunk * 2;
  }

  // The warps of a block put the rows that there are into shared memory, then all threads merge and write them.
  __device__ void write(float* results, int warp, int warps) {
    float* scales = results + warps * s.rows * kPitch;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 2 * c + i;
      const float total = of_near_lanes<4, 32>(sum[i], Sum{});
      if (row < s.rows) {
        if (g == 0) {
          *reinterpret_cast<float2*>(scales + (warp * s.rows + row) * 2) = make_float2(peak[i], total);
        }
#pragma unroll
        for (int tile = 0; tile < D / 16; ++tile) {
          float* to = results + (warp * s.rows + row) * kPitch + column_of(tile);
          *reinterpret_cast<float2*>(to) = make_float2(acc[tile][i] * kFactor, acc[tile][i + 2] * kFactor);
        }
      }
    }
    __syncthreads();
    merge_slices<T, kPitch>(p, s, results, scales, warps, s.rows);
  }
};

template <typename T, int D, typename Format>
__device__ inline void decode_quantized(const QuantizedParams& p) {
  begin_pdl();
  const Segment s = part_of_unit<true>(p);
  const int parts = parts_of_unit(p, s.span);
  if (static_cast<int>(blockIdx.x) >= parts) {
    return;
  }
  extern __shared__ uint4 memory[];
  float* results = reinterpret_cast<float*>(memory + QuantizedTraits::query_bytes(D) / 16);
  const int warp = threadIdx.x / 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  const int stride = warps * QuantizedTraits::kTileKeys;
  int tile = s.first + warp * QuantizedTraits::kTileKeys;
  QuantizedUnit<T, D, Format> unit(p, s);
  unit.look_up(tile);
  if (tile < s.last) {
    unit.load_keys(tile);
    unit.load_values(tile);
  }
  unit.look_up(tile + stride);
  unit.share_queries(memory, warp, warps);
  while (tile < s.last) {
    const int next = tile + stride;
    float scores[4] = {};
    unit.score(scores);
    unit.load_keys(next);
    unit.add(unit.weigh(scores, tile));
    unit.load_values(next);
    unit.look_up(next + stride);
    tile = next;
  }

  const unsigned long long ticket = read_ticket(p, s);
  unit.write(results, warp, warps);
  if (s.slot >= 0) {
    merge_parts<T>(p, s, {parts, s.unit * p.split_k.splits, s.unit * p.split_k.splits, 1}, ticket, results);
  }
}

template <bool Floats, int Bits>
struct FormatOf {
  using Type = Affine<Bits>;
};
template <>
struct FormatOf<true, 4> {
  using Type = Mxfp4;
};
template <>
struct FormatOf<true, 8> {
  using Type = Mxfp8;
};

}  // namespace mlx_cuda

#define MLX_CUDA_DECODE_QUANTIZED(name, dtype, D, FLOATS, BITS)                                            \
  extern "C" __global__ void __launch_bounds__(                                                            \
      mlx_cuda::QuantizedTraits::kMostWarps * 32,                                                          \
      mlx_cuda::QuantizedTraits{D, mlx_cuda::FormatOf<FLOATS, BITS>::Type::kBits}.resident_blocks())       \
      name(const __grid_constant__ mlx_cuda::QuantizedParams params) {                                     \
    mlx_cuda::decode_quantized<mlx_cuda::types::dtype, D, mlx_cuda::FormatOf<FLOATS, BITS>::Type>(params); \
  }
MLX_CUDA_DECODE_QUANTIZED_KERNELS(MLX_CUDA_DECODE_QUANTIZED)
