// out = x @ w^T of 17 and more rows of x and quantized w on Hopper, by wgmma with w as the left operand, from registers.
//
// A tile is 64 rows of w for each consumer warpgroup, a part 128 values of each. As in small_m_tile.cuh, a thread has adjacent
// values of a row (a chunk) and unpacks its own elements of the left operand; a warp prefetches its own to shared memory and
// waits for no other. All blocks need x, so an earlier kernel permutes it to match, part by part and in the layout of wgmma: 128
// adjacent bytes of each row, their pieces of 16 bytes swizzled. So one thread of a block copies it.
#include "device/kernel.cuh"
#include "device/ptx.cuh"
#include "device/types.cuh"
#include "matmul/quantized/batch.cuh"
#include "matmul/quantized/kernels.h"
#include "matmul/quantized/packed_rows_sm90.cuh"

namespace mlx_cuda {

[[maybe_unused]] constexpr int kConsumers = QuantizedSm90::kConsumers;
[[maybe_unused]] constexpr int kTileRows = QuantizedSm90::kTileRows;
[[maybe_unused]] constexpr int kPart = QuantizedSm90::kPart;
[[maybe_unused]] constexpr int kScaleParts = QuantizedSm90::kScaleParts;
[[maybe_unused]] constexpr int kResultStride = kTileRows + 4;

template <typename Format, int Columns>
struct Shared {
  static constexpr QuantizedSm90 kShape{Columns};
  static constexpr int kStages = kShape.stages();
  static constexpr int kDepth = kShape.depth();
  static constexpr int kStageBytes = kShape.stage_bytes();
  static constexpr int kSlotBytes = kShape.slot_bytes(Format::kBits);
  static_assert(kShape.shared_bytes(Format::kBits) <= 227 * 1024);  // the limit of a block on Hopper

  unsigned char* x;
  unsigned char* slots;
  unsigned* scales;
  Barrier* full;
  Barrier* empty;

  __device__ explicit Shared(unsigned char* memory) {
    x = memory + (1024 - shared_address(memory) % 1024) % 1024;
    slots = x + kStages * kStageBytes;
    scales = reinterpret_cast<unsigned*>(slots + kDepth * kSlotBytes);
    full = reinterpret_cast<Barrier*>(scales + kConsumers * QuantizedSm90::kScaleBytes);
    empty = full + kStages;
  }
};

template <int Stages>
struct Turn {
  int stage = 0;
  int parity = 0;
  __device__ void advance() {
    if (++stage == Stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

__device__ inline int parts_of(int inner) {
  return (inner + kPart - 1) / kPart;
}

// Where the parts of a block of rows of x begin: [batches][blocks of rows][parts][2][rows, in eights][64].
__device__ inline long long ordered_place(const QuantizedSm90Params& p, int batch, int first_row) {
  const long long before = static_cast<long long>(batch) * ((p.rows + 7) / 8 * 8) + first_row;
  return before * parts_of(p.inner) * (kPart * 2);
}

// The work of a block.
struct Block {
  int batch;
  int split;
  int first_row;  // of x
  int rows;
  int begin;  // of inner
  int there;  // of inner, from there on
  int parts;
  int part_bytes;  // of x
  int column;      // of the result: row of w

  __device__ Block(const QuantizedSm90Params& p, int columns)
      : batch(blockIdx.z),
        split(blockIdx.y % p.splits),
        first_row(blockIdx.y / p.splits * columns),
        rows(min(p.rows - first_row, columns)),
        begin(split * p.range),
        there(min(p.inner - begin, p.range)),
        parts(parts_of(there)),
        part_bytes((rows + 7) / 8 * 8 * kPart * 2),
        column(blockIdx.x * kTileRows) {}
};

// ------------------------------------------------------------------------------------------------------------------------ x
// A warp permutes 8 rows of a part: each lane 8 adjacent values of the 4 chunks that the 4 threads of a row of w have, twice 8
// pairs of the K of one wgmma.
template <typename Format>
__device__ inline void order(const QuantizedSm90Params& p) {
  const int groups = (p.rows + 7) / 8;
  const int item = blockIdx.x * QuantizedSm90::kOrderWarps + threadIdx.x / 32;
  const int part = item / groups;
  const int group = item % groups;
  const int batch = blockIdx.y;
  if (batch == 0) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < p.results; i += gridDim.x * blockDim.x) {
      p.arrived[i] = 0;
    }
  }
  if (part >= parts_of(p.inner)) {
    return;
  }
  const int lane = threadIdx.x % 32;
  const int row = lane % 8;
  const int line = lane / 16;
  const int piece = lane / 8 % 2;
  // Of 128 values, in pieces of 8: where the first chunk has this lane's, and how far the next one is.
  constexpr bool half = Format::kBits == 8;
  const int first = half ? line * 8 + piece : line * 2 + piece;
  constexpr int next = half ? 2 : 4;
  const long long from_row = min(group * 8 + row, p.rows - 1);  // rows after the last are ignored
  const auto* x = static_cast<const unsigned short*>(p.x) + x_matrix(p, batch) * p.x_distance + from_row * p.x_row;
  uint4 pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int value = part * kPart + (first + i * next) * 8;
    const uint4 v = value < p.inner ? load16<false>(x + value) : make_uint4(0, 0, 0, 0);
    unsigned next = 0;
    if constexpr (kWindows<Format>) {
      next = __shfl_sync(~0u, for_piece_before<Format>(v), (lane + 8) % 32);
    }
    pairs[i] = order_pairs<Format>(v, next);
  }
  const int first_row = group * 8 / p.block_rows * p.block_rows;
  const int rows = min(groups * 8 - first_row, p.block_rows);
  char* to = static_cast<char*>(p.ordered) + ordered_place(p, batch, first_row) +
             ((part * 2 + line) * static_cast<long long>(rows) + group * 8 - first_row + row) * 128;
  auto store = [&](int i, unsigned t0, unsigned t1, unsigned t2, unsigned t3) {
    *reinterpret_cast<uint4*>(to + ((piece * 4 + i) ^ row) * 16) = make_uint4(t0, t1, t2, t3);
  };
  store(0, pairs[0].x, pairs[1].x, pairs[2].x, pairs[3].x);
  store(1, pairs[0].y, pairs[1].y, pairs[2].y, pairs[3].y);
  store(2, pairs[0].z, pairs[1].z, pairs[2].z, pairs[3].z);
  store(3, pairs[0].w, pairs[1].w, pairs[2].w, pairs[3].w);
}

// By one thread.
template <typename Format, int Columns>
__device__ inline void produce(const QuantizedSm90Params& p, const Block& block, const Shared<Format, Columns>& shared) {
  using Memory = Shared<Format, Columns>;
  const char* from = static_cast<const char*>(p.ordered) + ordered_place(p, block.batch, block.first_row) +
                     static_cast<long long>(block.begin / kPart) * block.part_bytes;
  Turn<Memory::kStages> turn;
  for (int part = 0; part < block.parts; ++part, turn.advance()) {
    Barrier* full = shared.full + turn.stage;
    barrier_wait(shared.empty + turn.stage, turn.parity ^ 1);
    barrier_expect(full, block.part_bytes);
    copy_bytes(shared.x + turn.stage * Memory::kStageBytes, from, block.part_bytes, full);
    from += block.part_bytes;
  }
}

// ------------------------------------------------------------------------------------------------------------------------ w
// Of the blocks that share a result, the last to be done has the sums of all in its `results`, and goes on.
template <int Columns>
__device__ inline bool add_splits(const QuantizedSm90Params& p, const Block& block, float* results, unsigned* last, int thread) {
  constexpr int threads = kConsumers * 128;
  constexpr int fours = kTileRows / 4;
  const int row_blocks = gridDim.y / p.splits;
  const int index = (block.batch * row_blocks + blockIdx.y / p.splits) * gridDim.x + blockIdx.x;
  float4* all = reinterpret_cast<float4*>(p.partial) + static_cast<long long>(index) * p.splits * (Columns * fours);
  for (int i = thread; i < block.rows * fours; i += threads) {
    all[block.split * (Columns * fours) + i] =
        *reinterpret_cast<const float4*>(results + i / fours * kResultStride + i % fours * 4);
  }
  __threadfence();
  sync_some(1, threads);
  if (thread == 0) {
    *last = atomicAdd(p.arrived + index, 1) == p.splits - 1;
  }
  sync_some(1, threads);
  if (!*last) {
    return false;
  }
  __threadfence();
#pragma unroll 4
  for (int i = thread; i < block.rows * fours; i += threads) {
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 4
    for (int split = 0; split < p.splits; ++split) {
      const float4 part = __ldcg(all + split * (Columns * fours) + i);
      sum.x += part.x;
      sum.y += part.y;
      sum.z += part.z;
      sum.w += part.w;
    }
    *reinterpret_cast<float4*>(results + i / fours * kResultStride + i % fours * 4) = sum;
  }
  sync_some(1, threads);
  return true;
}

// The scales of the 16 rows of a warp. A lane loads those of one row and 256 values.
template <typename Format, typename T>
class WarpScales {
  using Part = ThreadPart<Format>;
  static constexpr int kUnit = Format::kBiased ? 2 : 1;
  static constexpr int kHalfParts = kScaleParts / 2;
  static constexpr int kStride = QuantizedSm90::kScaleStride;

 public:
  using PartFactors = Factors<Format, T>[2][Part::kChunks];  // of rows lane / 4 and lane / 4 + 8

  __device__ WarpScales(
      const QuantizedSm90Params& p, const Block& block, long long expert, int first_row, int warp, unsigned* scales)
      : lane_(threadIdx.x % 32),
        group_shift_(p.group_shift),
        wide_(p.wide),
        bytes_((256 * kUnit) >> p.group_shift),
        there_((block.there >> p.group_shift) * kUnit),
        words_(scales + warp * (QuantizedSm90::kScaleBytes / 4)) {
    const long long row = min(first_row + lane_ % 16, p.columns - 1);
    const long long place = expert * p.scale_distance + (row * p.groups + (block.begin >> p.group_shift)) * kUnit;
    scales_ = static_cast<const char*>(p.scales) + place;
    biases_ = static_cast<const char*>(p.biases) + place;
  }

  // Those of kScaleParts parts from this one on, to registers.
  __device__ void load(int part) {
    const int at = (part / kHalfParts + lane_ / 16) * bytes_;
    const int left = min(there_ - at, bytes_);
    load_scales<kUnit>(loaded_.scale, scales_ + at, bytes_, left, wide_);
    if constexpr (Format::kBiased) {
      load_scales<kUnit>(loaded_.bias, biases_ + at, bytes_, left, wide_);
    }
  }

  // And on to shared memory.
  __device__ void store() {
    __syncwarp();
    store_scales<Format, T>(words_ + lane_ % 16 * kStride + lane_ / 16 * 8, loaded_);
    __syncwarp();
  }

  __device__ void factors(int part, PartFactors& to) const {
#pragma unroll
    for (int c = 0; c < Part::kChunks; ++c) {
      const int value = part % kHalfParts * kPart + (c * 4 + lane_ % 4) * kChunk<Format>;  // of 256
      const int word = part % kScaleParts / kHalfParts * 8 + (Format::kBiased ? value >> group_shift_ : value / 32);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        to[r][c] = Factors<Format, T>(words_[(lane_ / 4 + 8 * r) * kStride + word]);
      }
    }
  }

 private:
  int lane_;
  int group_shift_;
  bool wide_;
  int bytes_;
  int there_;
  unsigned* words_;  // in shared memory
  const char* scales_;
  const char* biases_;
  RowScales loaded_;
};

// The left operands of 64 values (line 0 or 1) of a part.
template <typename Format, typename T>
__device__ inline void unpack_line(
    const typename ThreadPart<Format>::Rows& chunks,
    const typename WarpScales<Format, T>::PartFactors& factors,
    int line,
    unsigned (&weights)[4][4]) {
#pragma unroll
  for (int piece = 0; piece < 2; ++piece) {
    constexpr bool half = ThreadPart<Format>::kChunks == 2;
    const int c = half ? line : 0;
    const int j = half ? piece : line * 2 + piece;
    unsigned u[2][4];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      factors[r][c].weights(chunks[r][c], j, u[r]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      weights[piece * 2][i] = u[i % 2][i / 2];
      weights[piece * 2 + 1][i] = u[i % 2][2 + i / 2];
    }
  }
}

// Writes the consumers' sums to `results` [row of x][row of w] in the memory of x, when x is no longer read.
template <typename Format, typename T, int Columns>
__device__ inline void gather_sums(float* results, const float (&sums)[Columns / 2], const unsigned (&nans)[2], int thread) {
  const int lane = thread % 32;
  float* first = results + 2 * (lane % 4) * kResultStride + thread / 32 * 16 + lane / 4;
  sync_some(1, kConsumers * 128);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float factor = result_or_nan<Format>(kResultFactor<Format, T>, nans[r]);
#pragma unroll
    for (int i = 0; i < Columns / 4; ++i) {
      first[(i / 2 * 8 + i % 2) * kResultStride + 8 * r] = sums[i / 2 * 4 + 2 * r + i % 2] * factor;
    }
  }
  sync_some(1, kConsumers * 128);
}

template <typename T>
__device__ inline void write_results(const QuantizedSm90Params& p, const Block& block, const float* results, int thread) {
  const int column = thread % kTileRows;
  if (block.column + column < p.columns) {
    T* to = static_cast<T*>(p.out) + (static_cast<long long>(block.batch) * p.rows + block.first_row) * p.columns + block.column +
            column;
#pragma unroll 4
    for (int row = thread / kTileRows; row < block.rows; row += 2) {
      to[static_cast<long long>(row) * p.columns] = from_float<T>(results[row * kResultStride + column]);
    }
  }
}

template <typename Format, typename T, int Columns>
__device__ inline void consume(const QuantizedSm90Params& p, const Block& block, const Shared<Format, Columns>& shared) {
  using Memory = Shared<Format, Columns>;
  const int thread = static_cast<int>(threadIdx.x) - 128;
  const int lane = thread % 32;
  const int warp = thread / 32;
  const int first_row = block.column + warp * 16;
  const long long expert = w_expert(p, block.batch);
  const char* w = static_cast<const char*>(p.w) + expert * p.w_distance + block.begin / 8 * Format::kBits;
  PackedRows<Format, Memory::kDepth> rows(p, w, first_row, block.there, shared.slots);
#pragma unroll 1
  for (int i = 0; i < Memory::kDepth - 1; ++i) {
    rows.copy_next();
  }
  WarpScales<Format, T> scales(p, block, expert, first_row, warp, shared.scales);
  scales.load(0);

  const unsigned long long first_x = descriptor(shared.x);
  const int line_step = block.part_bytes / 2 / 16;
  float sums[Columns / 2] = {};
  unsigned nans[2] = {};
  Turn<Memory::kStages> turn;
  int last_stage = 0;
  typename ThreadPart<Format>::Rows chunks;
  if constexpr (kWindows<Format>) {
    rows.read_next(chunks);
  }
  for (int part = 0; part < block.parts; ++part) {
    if (part % kScaleParts == 0) {
      scales.store();
      scales.load(part + kScaleParts);
    }
    if constexpr (!kWindows<Format>) {
      rows.read_next(chunks);
    }
    rows.copy_next();
    typename WarpScales<Format, T>::PartFactors factors;
    scales.factors(part, factors);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int c = 0; c < ThreadPart<Format>::kChunks; ++c) {
        note_nans<Format>(nans[r], chunks[r][c]);
      }
    }
    const unsigned long long x = first_x + turn.stage * (Memory::kStageBytes / 16);
    unsigned weights[2][4][4];
#pragma unroll
    for (int line = 0; line < 2; ++line) {
      unpack_line<Format, T>(chunks, factors, line, weights[line]);
      if (line == 0) {
        barrier_wait(shared.full + turn.stage, turn.parity);
      }
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        wgmma_registers<0>(sums, weights[line][i], x + line * line_step + i * 2, T{});
      }
      wgmma_commit();
      if (kWindows<Format> && line == 1) {
        rows.read_next(chunks);
      }
      wgmma_wait<1>();
      if (line == 0 && part > 0 && lane == 0) {
        barrier_arrive(shared.empty + last_stage);
      }
    }
    last_stage = turn.stage;
    turn.advance();
  }
  wgmma_wait<0>();
  wgmma_results(sums);
  share_nans<Format>(nans);
  auto* results = reinterpret_cast<float*>(shared.x);
  gather_sums<Format, T, Columns>(results, sums, nans, thread);
  if (p.splits == 1 || add_splits<Columns>(p, block, results, reinterpret_cast<unsigned*>(shared.slots), thread)) {
    write_results<T>(p, block, results, thread);
  }
}

template <typename Format, typename T, int Columns>
__device__ inline void multiply(const QuantizedSm90Params& p) {
  using Memory = Shared<Format, Columns>;
  extern __shared__ unsigned char memory[];
  const Memory shared(memory);
  const Block block(p, Columns);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Memory::kStages; ++i) {
      barrier_init(shared.full + i, 1);
      barrier_init(shared.empty + i, kConsumers * 4);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    give_registers<24>();
    if (threadIdx.x == 0) {
      produce<Format>(p, block, shared);
    }
  } else {
    take_registers<240>();
    consume<Format, T>(p, block, shared);
  }
}

#define MLX_CUDA_SM90_ORDER(name, format) \
  MLX_CUDA_KERNEL(name, (QuantizedSm90::kOrderWarps * 32), QuantizedSm90Params, order<formats::format>)
#define MLX_CUDA_SM90(name, dtype, format, rows) \
  MLX_CUDA_KERNEL(name, (QuantizedSm90::kThreads, 1), QuantizedSm90Params, multiply<formats::format, types::dtype, rows>)
MLX_CUDA_QUANTIZED_SM90_KERNELS(MLX_CUDA_SM90_ORDER, MLX_CUDA_SM90)

}  // namespace mlx_cuda
