// MoE GEMV: rows of x times the quantized experts that they name, as in decoding, in the tiles of small_m_tile.cuh: up to 64
// pairs of a row and an expert.
//
// Pairs of the same expert are columns of one MMA (a batch), so that its weights are read once. Every warp finds the batches from
// the indices by itself. A work item is a tile of a batch: items are distributed evenly over the blocks, in order, so a block has
// x of one batch at a time and rarely switches to the next.
#include "device/kernel.cuh"
#include "device/types.cuh"
#include "matmul/quantized/kernels.h"
#include "matmul/quantized/params.h"
#include "matmul/quantized/small_m_tile.cuh"

namespace mlx_cuda {

[[maybe_unused]] constexpr int kTileRows = SmallMTile::kRows;
[[maybe_unused]] constexpr int kSlice = SmallMTile::kSlice;
[[maybe_unused]] constexpr int kRawScales = 512;     // bytes of a slice's scales in memory, and as many of its biases
[[maybe_unused]] constexpr unsigned kNoBatch = 255;  // leads none

// The batches of a call. Each lane has two pairs: its own number, and 32 more.
class Batches {
 public:
  // `table`, of this warp: the experts of the pairs, and the number of the batch that each leads with its rank among the pairs of
  // its expert.
  __device__ Batches(const MoeParams& p, unsigned* table) : table_(table), lane_(threadIdx.x % 32) {
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
    if (p.batch_rows > 1) {
      find_ranks(p, expert, leads, rank);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        leads[i] = leads[i] && rank[i] % p.batch_rows == 0;
      }
    }
    int number = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned leaders = __ballot_sync(~0u, leads[i]);
      const unsigned batch = leads[i] ? number + __popc(leaders & lanes_before()) : kNoBatch;
      table_[32 * i + lane_] = expert[i];
      table_[64 + 32 * i + lane_] = batch | static_cast<unsigned>(rank[i]) << 8;
      number += __popc(leaders);
    }
    count = number;
    __syncwarp();
  }

  __device__ unsigned expert(int batch) const {
    return table_[leader(batch)];
  }

  // The pairs of a batch.
  __device__ void find(const MoeParams& p, int batch, MoeBatch* found) const {
    const int first = leader(batch);
    const unsigned expert = table_[first];
    const int first_rank = table_[64 + first] >> 8;
    int rows = 0;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int pair = lane_ + 32 * i;
      const int row = static_cast<int>(table_[64 + pair] >> 8) - first_rank;
      const bool shares = pair < p.pairs && table_[pair] == expert && row >= 0 && row < p.batch_rows;
      const bool member = p.batch_rows > 1 ? shares : pair == first;
      if (member) {
        found->x_rows[row] = min(p.x_index ? p.x_index[pair] : pair, static_cast<unsigned>(p.matrices - 1));
        found->results[row] = (pair - batch) * p.columns;
      }
      rows += __popc(__ballot_sync(~0u, member));
    }
    if (lane_ == 0) {
      found->rows = rows;
    }
    __syncwarp();
  }

  int count;

 private:
  __device__ unsigned lanes_before() const {
    return (1u << lane_) - 1;
  }

  // How many pairs before each name the same expert. Bit by bit of the number: `same` are the pairs with the same bits as this
  // lane's two, of the first 32 both times and of the others.
  __device__ void find_ranks(const MoeParams& p, const unsigned (&expert)[2], const bool (&there)[2], int (&rank)[2]) const {
    const unsigned first = __ballot_sync(~0u, there[0]);
    unsigned same[3] = {first, first, __ballot_sync(~0u, there[1])};
#pragma unroll 1
    for (int bit = 0; (p.experts - 1) >> bit; ++bit) {
      const unsigned low = __ballot_sync(~0u, expert[0] >> bit & 1);
      const unsigned high = __ballot_sync(~0u, expert[1] >> bit & 1);
      const unsigned own[2] = {0 - (expert[0] >> bit & 1), 0 - (expert[1] >> bit & 1)};
      same[0] &= ~(low ^ own[0]);
      same[1] &= ~(low ^ own[1]);
      same[2] &= ~(high ^ own[1]);
    }
    rank[0] = __popc(same[0] & lanes_before());
    rank[1] = __popc(same[1]) + __popc(same[2] & lanes_before());
  }

  // The pair that leads it.
  __device__ int leader(int batch) const {
    const unsigned first = __ballot_sync(~0u, (table_[64 + lane_] & 255) == batch);
    return first ? __ffs(first) - 1 : 31 + __ffs(__ballot_sync(~0u, (table_[96 + lane_] & 255) == batch));
  }

  unsigned* table_;
  int lane_;
};

// The work of a block: items `first` to `last`, and the tiles per batch.
struct MoeItems {
  int tiles;
  int first;
  int last;

  __device__ MoeItems(const MoeParams& p, int batches) : tiles(p.columns / kTileRows) {
    const int items = batches * tiles;
    const int block = blockIdx.x;
    const int share = static_cast<int>(static_cast<unsigned>(items) / gridDim.x);
    const int rest = items - share * gridDim.x;
    first = block * share + min(block, rest);
    last = first + share + (block < rest ? 1 : 0);
  }
};

// The shared memory of a block, and in it this warp's.
struct MoeShared {
  unsigned char* x;
  unsigned char* scales;  // of two slices
  float* results;         // of two tiles, of all warps
  int tile_results;       // floats of one
  unsigned* table;        // of the batches
  MoeBatch* batch;

  __device__ MoeShared(const MoeParams& p, unsigned char* memory) : x(memory) {
    const int warp = threadIdx.x / 32;
    const int warps = blockDim.x / 32;
    unsigned char* after_x = memory + p.inner * 2 * p.batch_rows;
    scales = after_x + warp * MoeParams::kScaleBytes;
    results = reinterpret_cast<float*>(after_x + warps * MoeParams::kScaleBytes);
    tile_results = warps * p.batch_rows * SmallMTile::kResultStride;
    unsigned* tables = reinterpret_cast<unsigned*>(results + 2 * tile_results);
    table = tables + warp * (MoeParams::kTableBytes / 4);
    batch = reinterpret_cast<MoeBatch*>(tables + warps * (MoeParams::kTableBytes / 4)) + warp;
  }
};

// The rows of x of a batch to shared memory, as SmallMRow reads them.
template <typename Steps>
__device__ inline void stage_rows(const MoeParams& p, const MoeShared& shared) {
  using T = typename Steps::T;
  const int rows = shared.batch->rows;
#pragma unroll 1
  for (int piece = threadIdx.x; piece < p.inner / 8; piece += blockDim.x) {
#pragma unroll 1
    for (int first = 0; first < rows; first += 4) {
      uint4 v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const long long row = shared.batch->x_rows[min(first + i, rows - 1)];
        v[i] = __ldg(reinterpret_cast<const uint4*>(static_cast<const T*>(p.x) + row * p.x_distance) + piece);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (first + i < rows) {
          store_x<typename Steps::Format>(shared.x, p.batch_rows, first + i, piece, v[i]);
        }
      }
    }
  }
}

// A warp at its slices of the block's items: current operands and prefetched ones.
template <typename Steps>
class MoeWarp {
  using Format = typename Steps::Format;
  using T = typename Steps::T;

 public:
  __device__ MoeWarp(const MoeParams& p, const Batches& batches, const MoeItems& items, const MoeShared& shared)
      : p_(p),
        batches_(batches),
        items_(items),
        shared_(shared),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x / 32),
        warps_(blockDim.x / 32),
        slices_(p.inner / kSlice),
        scale_bytes_(p.row_scales / slices_),
        x_(shared.x, p.batch_rows, lane_),
        next_item_(items.first),
        next_slice_(warp_),
        x_end_(items.first) {
    enter(items.first);
    item_ = next_item_;
    slice_ = next_slice_;
    w_ = next_w_;
  }

  __device__ bool has_item() const {
    return item_ < items_.last;
  }
  __device__ bool ends_item() const {
    return next_slice_ <= slice_;
  }
  __device__ void advance() {
    item_ = next_item_;
    slice_ = next_slice_;
    w_ = next_w_;
    next_slice_ = slice_ + warps_;
    if (next_slice_ >= slices_) {
      next_slice_ = warp_;
      ++next_item_;
      if (next_item_ < items_.last && next_item_ % items_.tiles == 0) {
        enter(next_item_);
      }
    }
  }

  // The state at the start of the first slice.
  __device__ void load_first() {
    load_next_scales();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      load_ahead(Steps::kSteps - 2 + i / 2, i % 2);
    }
  }

  // Loads x of the next batch, if the item belongs to it; the last one's is not read after the results of its last tile.
  __device__ void stage_batch() {
    if (item_ == x_end_) {
      const int batch = item_ / items_.tiles;
      x_end_ = min((batch + 1) * items_.tiles, items_.last);
      batches_.find(p_, batch, shared_.batch);
      stage_rows<Steps>(p_, shared_);
      __syncthreads();
    }
  }

  // Computes a slice and loads the scales of the next and, after each half of a step, that of two steps later.
  __device__ void run_slice() {
    store_loaded_scales();
    const unsigned char* scales = shared_.scales + scale_part_;
    load_next_scales();
#pragma unroll
    for (int step = 0; step < Steps::kSteps; ++step) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        multiply(step, m, scales);
        load_ahead(step, m);
      }
    }
  }

  // Reduces the sums of an item's warps through shared memory and writes the result. The next item uses another part of it, so no
  // thread waits until these are read.
  __device__ void write_item() {
    share_nans<Format>(nans_);
    const int rows = shared_.batch->rows;
    float* results = shared_.results + result_part_;
    result_part_ = shared_.tile_results - result_part_;
    write_sums(results, rows);
    __syncthreads();
    add_sums(results, rows);
  }

 private:
  // This thread's part of w and of its scales in the batch of an item, as if the batch's first tile had the number 0.
  __device__ void enter(int item) {
    const int batch = item / items_.tiles;
    const long long expert = batches_.expert(batch);
    const long long row = -static_cast<long long>(batch) * p_.columns;
    next_w_ = static_cast<const char*>(p_.w) + expert * p_.w_distance + (row + lane_ / 4) * p_.row_bytes +
              lane_ % 4 * (Steps::kWords * 4);
    scales_ = static_cast<const char*>(p_.scales) + expert * p_.scale_distance + (row + lane_) * p_.row_scales;
  }

  // Loads the scales of the next slice, a lane per row: to the other part of shared memory, or to registers.
  __device__ void load_next_scales() {
    const char* from = scales_ + static_cast<long long>(next_item_) * (kTileRows * p_.row_scales) + next_slice_ * scale_bytes_;
    if constexpr (Format::kBiased) {
      scale_part_ ^= 2 * kRawScales;
      if (next_item_ < items_.last) {
        unsigned char* to = shared_.scales + scale_part_ + lane_ * scale_bytes_;
        const char* biases = from + (static_cast<const char*>(p_.biases) - static_cast<const char*>(p_.scales));
        if (scale_bytes_ == 8) {
          copy_async_cached<8>(to, from);
          copy_async_cached<8>(to + kRawScales, biases);
        } else if (scale_bytes_ == 16) {
          copy_async_cached<16>(to, from);
          copy_async_cached<16>(to + kRawScales, biases);
        } else {
          copy_async_cached<4>(to, from);
          copy_async_cached<4>(to + kRawScales, biases);
        }
      }
      commit_copies();
    } else if (next_item_ < items_.last) {
      load_scales<1>(loaded_scales_.scale, from, scale_bytes_, scale_bytes_, true);
    }
  }

  // The scales that have been loaded become those of the slice.
  __device__ void store_loaded_scales() {
    if constexpr (Format::kBiased) {
      wait_copies<0>();
    } else {
      __syncwarp();
      store_scales<Format, T>(reinterpret_cast<unsigned*>(shared_.scales) + lane_ * SmallMTile::kScaleStride, loaded_scales_);
    }
    __syncwarp();
  }

  // The step after the next; for the last steps of a slice, one of the next slice: rows g + 16 m and g + 16 m + 8.
  __device__ void load_ahead(int step, int m) {
    const bool same = step + 2 < Steps::kSteps;
    const int ahead = same ? step + 2 : step + 2 - Steps::kSteps;
    const int item = same ? item_ : next_item_;
    if (item < items_.last) {
      const char* from = (same ? w_ : next_w_) + static_cast<long long>(item * kTileRows + m * 16) * p_.row_bytes +
                         ((same ? slice_ : next_slice_) * (kSlice * Steps::kBits / 8) + ahead * (Steps::kWords * 16));
      load_chunk<false>(chunks_[ahead % 2][2 * m], from);
      load_chunk<false>(chunks_[ahead % 2][2 * m + 1], from + 8 * p_.row_bytes);
    }
  }

  __device__ Factors<Format, T> factors(const unsigned char* scales, int row, int value) const {
    if constexpr (Format::kBiased) {
      Factors<Format, T> factors;
      const unsigned char* raw = scales + row * scale_bytes_ + (value >> p_.group_shift) * 2;
      const unsigned scale = *reinterpret_cast<const unsigned short*>(raw);
      const unsigned bias = *reinterpret_cast<const unsigned short*>(raw + kRawScales);
      factors.first = scaled_pair<0>(scale * 0x10001u, T{});
      factors.second = scaled_pair<1>(bias * 0x10001u, T{});
      return factors;
    } else {
      return Factors<Format, T>(reinterpret_cast<const unsigned*>(scales)[row * SmallMTile::kScaleStride + value / 32]);
    }
  }

  // Half of a step: 16 rows of w.
  __device__ void multiply(int step, int m, const unsigned char* scales) {
    const auto& chunks = chunks_[step % 2];
    Factors<Format, T> own[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      own[r] = factors(scales, lane_ / 4 + 8 * r + 16 * m, step * Steps::kStep + lane_ % 4 * Steps::kValues);
      note_nans<Format>(nans_[2 * m + r], chunks[2 * m + r]);
    }
    const int line = x_.line(p_.batch_rows, slice_, step);
#pragma unroll
    for (int j = 0; j < Steps::kValues / 8; ++j) {
      unsigned u[4];
      unsigned v[4];
      own[0].weights(chunks[2 * m], j, u);
      own[1].weights(chunks[2 * m + 1], j, v);
      const uint4 b = x_.load(line, step, j, 0);
      mma(sums_[m][0], make_uint4(u[0], v[0], u[1], v[1]), b.x, b.y, T{});
      mma(sums_[m][1], make_uint4(u[2], v[2], u[3], v[3]), b.z, b.w, T{});
    }
  }

  // To shared memory [warp][pair][row of w], and begins new ones.
  __device__ void write_sums(float* results, int rows) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int row = 2 * (lane_ % 4) + c % 2;
        if (row < rows) {
          results[(warp_ * p_.batch_rows + row) * SmallMTile::kResultStride + m * 16 + lane_ / 4 + c / 2 * 8] =
              result_or_nan<Format>(sums_[m][0][c] + sums_[m][1][c], nans_[2 * m + c / 2]);
        }
        sums_[m][0][c] = 0.0f;
        sums_[m][1][c] = 0.0f;
      }
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      nans_[r] = 0;
    }
  }

  // The warps take turns at the first row.
  __device__ void add_sums(const float* results, int rows) const {
#pragma unroll 1
    for (int row = (warp_ + item_) % warps_; row < rows; row += warps_) {
      float sum = 0.0f;
#pragma unroll 1
      for (int i = 0; i < warps_; ++i) {
        sum += results[(i * p_.batch_rows + row) * SmallMTile::kResultStride + lane_];
      }
      const int place = static_cast<int>(shared_.batch->results[row]) + item_ * kTileRows + lane_;
      static_cast<T*>(p_.out)[place] = from_float<T>(sum * kResultFactor<Format, T>);
    }
  }

  const MoeParams& p_;
  const Batches& batches_;
  const MoeItems& items_;
  const MoeShared& shared_;
  int lane_;
  int warp_;
  int warps_;
  int slices_;
  int scale_bytes_;  // of a slice of a row
  SmallMRow<Steps> x_;
  int item_;  // being computed
  int slice_;
  const char* w_;
  int next_item_;  // being loaded
  int next_slice_;
  const char* next_w_;
  const char* scales_;
  int x_end_;                         // of the items whose x is in shared memory
  int scale_part_ = 0;                // where the scales are that are loaded
  int result_part_ = 0;               // where the results are to be written
  typename Steps::Chunks chunks_[2];  // of two steps
  RowScales loaded_scales_;
  float sums_[2][2][4] = {};  // accumulators of even and odd MMAs of each 16 rows, which are independent
  unsigned nans_[4] = {};
};

template <typename Steps>
__device__ inline void moe(const MoeParams& p) {
  extern __shared__ __align__(128) unsigned char memory[];
  const MoeShared shared(p, memory);
  const Batches batches(p, shared.table);
  const MoeItems items(p, batches.count);
  if (items.first == items.last) {
    return;
  }
  MoeWarp<Steps> warp(p, batches, items, shared);
  warp.load_first();
  warp.advance();
#pragma unroll 1
  while (warp.has_item()) {
    warp.stage_batch();
    warp.run_slice();
    if (warp.ends_item()) {
      warp.write_item();
    }
    warp.advance();
  }
}

#define MLX_CUDA_MOE(name, dtype, format) \
  MLX_CUDA_KERNEL(                        \
      name, (MoeParams::kMostWarps * 32, MoeParams::kBlocks), MoeParams, moe<SmallMSteps<formats::format, types::dtype>>)
MLX_CUDA_MOE_KERNELS(MLX_CUDA_MOE)

}  // namespace mlx_cuda
