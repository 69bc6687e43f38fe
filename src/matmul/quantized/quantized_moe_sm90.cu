// Rows of x times the quantised experts that they name, as while decoding with experts: up to 64 pairs of a row and an expert.
//
// The products are those of quantized_skinny.cu: tiles of 32 rows of w as the left operand, slices of 256 values of inner, of which
// a thread unpacks what it has loaded. Pairs that name the same expert are columns of one product (a unit), so that its weights are
// read once. Every warp finds the units from the indices by itself. The tiles of all units are shared out evenly among the blocks,
// one after another, so a block has x of one unit at a time and rarely goes on to the next.
#include "matmul/quantized/moe_params.h"
#include "matmul/quantized/scales.cuh"

namespace mlx_cuda {

[[maybe_unused]] constexpr int kTileRows = PairsParams::kTileRows;
[[maybe_unused]] constexpr int kSlice = PairsParams::kSlice;
[[maybe_unused]] constexpr int kResultStride = PairsParams::kResultStride;
[[maybe_unused]] constexpr int kScaleStride = 12;   // words of a row's scales of a slice (8 at most), for eight different banks
[[maybe_unused]] constexpr int kRawScales = 512;    // bytes of a slice's scales as they lie in memory, and as many of its biases
[[maybe_unused]] constexpr unsigned kNoUnit = 255;  // leads none
[[maybe_unused]] constexpr int kMemberRows = 16;    // where a unit's number of pairs is, after their rows of x and their results

template <int Bytes>
__device__ inline void copy_async(void* to, const void* from) {
  const auto address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address), "l"(from), "n"(Bytes) : "memory");
}

// The units of a call. Each lane has two pairs: its own number, and 32 more.
class Units {
 public:
  // `table`, of this warp: the experts of the pairs, and the number of the unit that each leads with its rank among the pairs of
  // its expert.
  __device__ Units(const PairsParams& p, unsigned* table) : table_(table), lane_(threadIdx.x % 32) {
    unsigned expert[2] = {0, 0};
    int rank[2] = {0, 0};
    bool leads[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int pair = lane_ + 32 * i;
      leads[i] = pair < p.pairs;
      if (leads[i]) {
        expert[i] = min(p.w_index[pair], static_cast<unsigned>(p.experts - 1));
      }
    }
    const unsigned before = (1u << lane_) - 1;
    if (p.together > 1) {
      // Bit by bit: of which pairs the experts are the same as of these, of the first 32 both times and of the others.
      const unsigned first = __ballot_sync(~0u, leads[0]);
      unsigned same[3] = {first, first, __ballot_sync(~0u, leads[1])};
#pragma unroll 1
      for (int bit = 0; (p.experts - 1) >> bit; ++bit) {
        const unsigned low = __ballot_sync(~0u, expert[0] >> bit & 1);
        const unsigned high = __ballot_sync(~0u, expert[1] >> bit & 1);
        const unsigned own[2] = {0 - (expert[0] >> bit & 1), 0 - (expert[1] >> bit & 1)};
        same[0] &= ~(low ^ own[0]);
        same[1] &= ~(low ^ own[1]);
        same[2] &= ~(high ^ own[1]);
      }
      rank[0] = __popc(same[0] & before);
      rank[1] = __popc(same[1]) + __popc(same[2] & before);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        leads[i] = leads[i] && rank[i] % p.together == 0;
      }
    }
    int number = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned leaders = __ballot_sync(~0u, leads[i]);
      const unsigned unit = leads[i] ? number + __popc(leaders & before) : kNoUnit;
      table_[32 * i + lane_] = expert[i];
      table_[64 + 32 * i + lane_] = unit | static_cast<unsigned>(rank[i]) << 8;
      number += __popc(leaders);
    }
    count = number;
    __syncwarp();
  }

  __device__ unsigned expert(int unit) const {
    return table_[leader(unit)];
  }

  // The pairs of a unit, by `members`: their rows of x, from 8 on where their results begin if the unit's first tile has that
  // number, and how many there are.
  __device__ void find(const PairsParams& p, int unit, unsigned* members) const {
    const int first = leader(unit);
    const unsigned expert = table_[first];
    const int first_rank = table_[64 + first] >> 8;
    int rows = 0;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int pair = lane_ + 32 * i;
      const int row = static_cast<int>(table_[64 + pair] >> 8) - first_rank;
      const bool shares = pair < p.pairs && table_[pair] == expert && row >= 0 && row < p.together;
      const bool member = p.together > 1 ? shares : pair == first;
      if (member) {
        members[row] = min(p.x_index ? p.x_index[pair] : pair, static_cast<unsigned>(p.matrices - 1));
        members[8 + row] = (pair - unit) * p.columns;
      }
      rows += __popc(__ballot_sync(~0u, member));
    }
    if (lane_ == 0) {
      members[kMemberRows] = rows;
    }
    __syncwarp();
  }

  int count;

 private:
  // The pair that leads it.
  __device__ int leader(int unit) const {
    const unsigned first = __ballot_sync(~0u, (table_[64 + lane_] & 255) == unit);
    return first ? __ffs(first) - 1 : 31 + __ffs(__ballot_sync(~0u, (table_[96 + lane_] & 255) == unit));
  }

  unsigned* table_;
  int lane_;
};

// Rows of x to shared memory, [inner / 128][together][128], in the order in which w is unpacked.
template <typename Format, typename T>
__device__ inline void stage_rows(unsigned char* to, const PairsParams& p, const unsigned* members) {
  const int rows = members[kMemberRows];
#pragma unroll 1
  for (int piece = threadIdx.x; piece < p.inner / 8; piece += blockDim.x) {
#pragma unroll 1
    for (int first = 0; first < rows; first += 4) {
      uint4 v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const long long row = members[min(first + i, rows - 1)];
        v[i] = __ldg(reinterpret_cast<const uint4*>(static_cast<const T*>(p.x) + row * p.x_distance) + piece);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (first + i < rows) {
          *reinterpret_cast<uint4*>(to + piece / 16 * p.together * 256 + x_place<Format>(first + i, piece % 16)) =
              order_pairs<Format>(v[i]);
        }
      }
    }
  }
}

// Factors of 16 bits as they are stored, as the words of store_scales have them.
template <typename Format>
__device__ inline void set_factors(Factors<Format, __nv_bfloat16>& to, unsigned scale, unsigned bias) {
  to.first = as_bits(__hmul2(as_pair<__nv_bfloat16>(scale * 0x10001u), as_pair<__nv_bfloat16>(0x70007000u)));  // 2^97
  to.second = as_bits(__hmul2(as_pair<__nv_bfloat16>(bias * 0x10001u), as_pair<__nv_bfloat16>(0x2d802d80u)));  // 2^-36
}
template <typename Format>
__device__ inline void set_factors(Factors<Format, __half>& to, unsigned scale, unsigned bias) {
  to.first = scale * 0x10001u;
  to.second = bias * 0x10001u;
}

template <typename Format, typename T>
__device__ inline void pairs(const PairsParams& p) {
  constexpr int bits = Format::kBits;
  constexpr int chunk_values = kChunk<Format>;
  constexpr int step_values = 4 * chunk_values;
  constexpr int words = chunk_values * bits / 32;
  constexpr int steps = kSlice / step_values;
  extern __shared__ __align__(128) unsigned char shared[];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int warps = blockDim.x / 32;
  const int g = lane / 4;
  const int t = lane % 4;

  unsigned char* own_scales = shared + p.inner * 2 * p.together + warp * PairsParams::kScaleBytes;
  float* results = reinterpret_cast<float*>(shared + p.inner * 2 * p.together + warps * PairsParams::kScaleBytes);
  const int result_part = warps * p.together * kResultStride;
  unsigned* tables = reinterpret_cast<unsigned*>(results + 2 * result_part);
  unsigned* members = tables + warps * (PairsParams::kTableBytes / 4) + warp * (PairsParams::kMemberBytes / 4);
  const Units units(p, tables + warp * (PairsParams::kTableBytes / 4));

  // An item is a tile of a unit; these are the block's.
  const int all_tiles = p.columns / kTileRows;
  const int items = units.count * all_tiles;
  const int block = blockIdx.x;
  const int share = static_cast<int>(static_cast<unsigned>(items) / gridDim.x);
  const int rest = items - share * gridDim.x;
  const int first_item = block * share + min(block, rest);
  const int last_item = first_item + share + (block < rest ? 1 : 0);
  if (first_item == last_item) {
    return;
  }

  // This thread's part of w and of its scales, as if the unit's first tile had the number 0.
  const char* w = nullptr;
  const char* scales = nullptr;
  const auto to_biases = static_cast<const char*>(p.biases) - static_cast<const char*>(p.scales);
  const int row_bytes = static_cast<int>(p.row_bytes);
  const int scale_bytes = p.row_scales / (p.inner / kSlice);
  auto enter = [&](int of) {
    const int unit = of / all_tiles;
    const long long expert = units.expert(unit);
    const long long row = -static_cast<long long>(unit) * p.columns;
    w = static_cast<const char*>(p.w) + expert * p.w_distance + (row + g) * row_bytes + t * (chunk_values * bits / 8);
    scales = static_cast<const char*>(p.scales) + expert * p.scale_distance + (row + lane) * p.row_scales;
  };

  // What is loaded next.
  const int slices = p.inner / kSlice;
  int next_slice = warp;
  int next_item = first_item;
  enter(first_item);

  // What is computed.
  int slice = next_slice;
  int item = next_item;
  const char* now_w = w;
  auto advance = [&] {
    slice = next_slice;
    item = next_item;
    now_w = w;
    next_slice = slice + warps;
    if (next_slice >= slices) {
      next_slice = warp;
      ++next_item;
      if (next_item < last_item && next_item % all_tiles == 0) {
        enter(next_item);
      }
    }
  };

  unsigned chunks[2][4][words];  // of rows g, g + 8, g + 16, g + 24, of two steps
  RowScales row_scales;
  int scale_part = 0;
  auto load_scales_ahead = [&] {
    const char* from = scales + static_cast<long long>(next_item) * (kTileRows * p.row_scales) + next_slice * scale_bytes;
    if constexpr (Format::kBiased) {
      scale_part ^= 2 * kRawScales;
      if (next_item < last_item) {
        unsigned char* to = own_scales + scale_part + lane * scale_bytes;
        const char* biases = from + to_biases;
        if (scale_bytes == 8) {
          copy_async<8>(to, from);
          copy_async<8>(to + kRawScales, biases);
        } else if (scale_bytes == 16) {
          copy_async<16>(to, from);
          copy_async<16>(to + kRawScales, biases);
        } else {
          copy_async<4>(to, from);
          copy_async<4>(to + kRawScales, biases);
        }
      }
      asm volatile("cp.async.commit_group;" ::: "memory");
    } else if (next_item < last_item) {
      load_scales<1>(row_scales.scale, from, scale_bytes, scale_bytes, true);
    }
  };

  // The step after the next, of the next slice but for the first ones of four: rows g + 16 m and g + 16 m + 8.
  auto load_ahead = [&](int step, int m) {
    const bool same = step + 2 < steps;
    const int ahead = same ? step + 2 : step + 2 - steps;
    const int of = same ? item : next_item;
    if (of < last_item) {
      const char* from = (same ? now_w : w) + static_cast<long long>(of * kTileRows + m * 16) * row_bytes +
                         ((same ? slice : next_slice) * (kSlice * bits / 8) + ahead * (step_values * bits / 8));
      load_chunk<false>(chunks[ahead % 2][2 * m], from);
      load_chunk<false>(chunks[ahead % 2][2 * m + 1], from + 8 * row_bytes);
    }
  };

  float sums[2][2][4] = {};  // of the even and the odd products of each 16 rows, which need not wait for one another
  unsigned nans[4] = {};
  // This thread's row of x; a product has its own column for each, so that it does not matter what the missing ones are.
  const unsigned char* x_row[2] = {
      shared + x_place<Format>(min(g, p.together - 1), t * (kChunk<Format> / 8)),
      shared + x_place<Format>(min(g, p.together - 1), t * (kChunk<Format> / 8) + 1)};
  auto multiply = [&](int step, int m, const unsigned char* raw_scales) {
    const int value = step * step_values + t * chunk_values;
    Factors<Format, T> factors[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = g + 8 * r + 16 * m;
      if constexpr (Format::kBiased) {
        const unsigned char* raw = raw_scales + row * scale_bytes + (value >> p.group_shift) * 2;
        set_factors<Format>(
            factors[r], *reinterpret_cast<const unsigned short*>(raw), *reinterpret_cast<const unsigned short*>(raw + kRawScales));
      } else {
        factors[r] = Factors<Format, T>(reinterpret_cast<const unsigned*>(raw_scales)[row * kScaleStride + value / 32]);
      }
      if constexpr (kFp8<Format>) {
#pragma unroll
        for (int i = 0; i < words; ++i) {
          nans[2 * m + r] |= fp8_nans(chunks[step % 2][2 * m + r][i]);
        }
      }
    }
    const int x_step = (slice * 2 + step * step_values / 128) * p.together * 256;
#pragma unroll
    for (int j = 0; j < chunk_values / 8; ++j) {
      unsigned u[4];
      unsigned v[4];
      factors[0].weights(chunks[step % 2][2 * m], j, u);
      factors[1].weights(chunks[step % 2][2 * m + 1], j, v);
      const int turn = step * step_values % 128 / 32 + j / 2 * 2;  // see x_place
      const uint4 b = *reinterpret_cast<const uint4*>(x_row[j % 2] + x_step + turn * 64);
      mma(sums[m][0], make_uint4(u[0], v[0], u[1], v[1]), b.x, b.y, T{});
      mma(sums[m][1], make_uint4(u[2], v[2], u[3], v[3]), b.z, b.w, T{});
    }
  };

  load_scales_ahead();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    load_ahead(steps - 2 + i / 2, i % 2);
  }
  advance();

  int part = 0;            // which half of the results is to be written
  int x_end = first_item;  // of the items whose x is in shared memory
#pragma unroll 1
  while (item < last_item) {
    if (item == x_end) {  // the next unit; nobody reads the last one's x after the results of its last tile
      const int unit = item / all_tiles;
      x_end = min((unit + 1) * all_tiles, last_item);
      units.find(p, unit, members);
      stage_rows<Format, T>(shared, p, members);
      __syncthreads();
    }
    if constexpr (Format::kBiased) {
      asm volatile("cp.async.wait_group 0;" ::: "memory");
    } else {
      __syncwarp();
      store_scales<Format, T>(reinterpret_cast<unsigned*>(own_scales) + lane * kScaleStride, row_scales);
    }
    __syncwarp();
    const unsigned char* raw_scales = own_scales + scale_part;
    load_scales_ahead();
#pragma unroll
    for (int step = 0; step < steps; ++step) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        multiply(step, m, raw_scales);
        load_ahead(step, m);
      }
    }

    if (next_slice <= slice) {  // that was the last of the tile
      if constexpr (kFp8<Format>) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          nans[r] |= __shfl_xor_sync(~0u, nans[r], 1);
          nans[r] |= __shfl_xor_sync(~0u, nans[r], 2);
        }
      }
      // The sums of the warps of a tile, through shared memory: [warp][pair][row of w]. The other half is for the next tile,
      // so nobody has to wait until these are read.
      const int rows = members[kMemberRows];
      float* own = results + part;
      part = result_part - part;
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int row = 2 * t + c % 2;
          if (row < rows) {
            const bool nan = kFp8<Format> && nans[2 * m + c / 2];
            own[(warp * p.together + row) * kResultStride + m * 16 + g + c / 2 * 8] =
                nan ? __uint_as_float(0x7fc00000u) : sums[m][0][c] + sums[m][1][c];
          }
          sums[m][0][c] = 0.0f;
          sums[m][1][c] = 0.0f;
        }
      }
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        nans[r] = 0;
      }
      __syncthreads();
      // The warps take turns at the first row.
#pragma unroll 1
      for (int row = (warp + item) % warps; row < rows; row += warps) {
        float sum = 0.0f;
#pragma unroll 1
        for (int i = 0; i < warps; ++i) {
          sum += own[(i * p.together + row) * kResultStride + lane];
        }
        const int place = static_cast<int>(members[8 + row]) + item * kTileRows + lane;
        static_cast<T*>(p.out)[place] = from_float<T>(sum * kResultFactor<Format, T>);
      }
    }
    advance();
  }
}

}  // namespace mlx_cuda

#define MLX_CUDA_PAIRS(name, ...)                                                                                      \
  extern "C" __global__ void __launch_bounds__(mlx_cuda::PairsParams::kMostWarps * 32, mlx_cuda::PairsParams::kBlocks) \
      quantized_pairs_##name(const __grid_constant__ mlx_cuda::PairsParams params) {                                   \
    mlx_cuda::pairs<__VA_ARGS__>(params);                                                                              \
  }

#define MLX_CUDA_PAIRS_FORMAT(name, ...)              \
  MLX_CUDA_PAIRS(name##_float16, __VA_ARGS__, __half) \
  MLX_CUDA_PAIRS(name##_bfloat16, __VA_ARGS__, __nv_bfloat16)

#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // measured on an H200 only; other GPUs, and other bits, have quantized_skinny.cu
MLX_CUDA_PAIRS_FORMAT(affine2, mlx_cuda::Affine<2>)
MLX_CUDA_PAIRS_FORMAT(affine4, mlx_cuda::Affine<4>)
MLX_CUDA_PAIRS_FORMAT(affine8, mlx_cuda::Affine<8>)
MLX_CUDA_PAIRS_FORMAT(mxfp4, mlx_cuda::Mxfp4)
MLX_CUDA_PAIRS_FORMAT(mxfp8, mlx_cuda::Mxfp8)
MLX_CUDA_PAIRS_FORMAT(nvfp4, mlx_cuda::Nvfp4)
#endif
