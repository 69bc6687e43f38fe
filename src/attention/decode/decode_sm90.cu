// Decode attention on Hopper for more rows than one tile of mma.sync: the pipeline of decode.cu with TMA and wgmma.
//
// The queries of all heads that share a kv head are the 64 rows of a warpgroup's wgmma, whose operands the tensor cores read from
// shared memory: with mma.sync, each warp of 16 rows would load all keys and values into its registers again. One producer warp
// prefetches tiles of keys and values, across the block's units of work, as far ahead as there are stages.
#include "attention/decode/kernels.h"
#include "attention/decode/results.cuh"
#include "device/ptx.cuh"
#include "device/reduce.cuh"
#include "device/types.cuh"

namespace mlx_cuda {

[[maybe_unused]] constexpr int kGroups = Sm90Traits::kGroups;
[[maybe_unused]] constexpr int kGroupRows = Sm90Traits::kGroupRows;
[[maybe_unused]] constexpr int kConsumers = Sm90Traits::kConsumers;
[[maybe_unused]] constexpr int kTileKeys = Sm90Traits::kTileKeys;
[[maybe_unused]] constexpr int kChunk = 64;  // columns in 128 adjacent bytes

// A block's shared memory. The groups have 64 rows each and share the tiles, or share the rows and take turns at tiles, depending
// on `row_groups`.
template <int D>
struct Shared {
  static constexpr Sm90Traits kTraits{D};
  static constexpr int kStages = kTraits.stages();
  static constexpr int kPitch = result_pitch(D);

  // A barrier distinguishes the last phase from the one before by parity only. So a group that waits for a stage must have waited
  // for its previous phase: if the groups take turns at tiles, each has to meet the same stages again.
  static_assert(kStages % kGroups == 0 && kStages >= 2 * kGroups, "a group frees a stage after it has waited for its next one");

  char* ring;  // [stage][keys, values]
  char* queries;
  Barrier* full;
  Barrier* empty;
  float* results;  // [row][pitch], and
  float* scales;   // [row][2]: the second slice's

  __device__ Shared(char* memory, int row_groups) : ring(memory), queries(ring + 2 * kStages * kTraits.tile_bytes()) {
    full = reinterpret_cast<Barrier*>(queries + row_groups * kTraits.query_bytes());
    empty = full + kStages;
    results = reinterpret_cast<float*>(empty + kStages);
    scales = results + kGroupRows * kPitch;
  }
  __device__ char* keys(int stage) const {
    return ring + 2 * stage * kTraits.tile_bytes();
  }
  __device__ char* values(int stage) const {
    return keys(stage) + kTraits.tile_bytes();
  }
};

// The phase parity of a pipeline of `Stages` at an iteration.
template <int Stages>
__device__ inline int parity(int turn) {
  return turn / Stages % 2;
}

// A tile of keys or values.
template <int D>
__device__ inline void copy_tile(
    char* to, const TensorMap* map, Barrier* barrier, unsigned long long once, const Segment& s, int key) {
#pragma unroll
  for (int chunk = 0; chunk < D / kChunk; ++chunk) {
    copy_box_once(to + chunk * kTileKeys * 128, map, barrier, once, chunk * kChunk, key, s.kv_head, s.batch);
  }
}

template <int D>
__device__ inline void produce(const DecodeParams& p, const Shared<D>& shared, const TensorMap* k_map, const TensorMap* v_map) {
  constexpr int kStages = Shared<D>::kStages;
  const unsigned long long once = evict_first();
  Segments segments(p);
  Segment s;
  int turn = 0;
  while (segments.next(s)) {
    for (int i = 0; i < s.tiles; ++i, ++turn) {
      if (threadIdx.x % 32 == 0) {
        const int stage = turn % kStages;
        Barrier* full = shared.full + stage;
        barrier_wait(shared.empty + stage, parity<kStages>(turn) ^ 1);
        barrier_expect(full, 2 * Shared<D>::kTraits.tile_bytes());
        const int key = s.first + i * kTileKeys;
        copy_tile<D>(shared.keys(stage), k_map, full, once, s, key);
        copy_tile<D>(shared.values(stage), v_map, full, once, s, key);
      }
    }
  }
}

// The queries of a unit, as the copy engine would swizzle them.
template <typename T, int D>
__device__ inline void load_queries(const DecodeParams& p, const Segment& s, char* to) {
#pragma unroll 4
  for (int index = threadIdx.x; index < p.row_warps * kGroupRows * (D / 8); index += kConsumers) {
    const int row = index / (D / 8);
    const int piece = index % (D / 8);
    const uint4 value = query_piece<T>(p, s, row, piece * 8);
    const int chunk = row / kGroupRows * (D / kChunk) + piece / 8;
    *reinterpret_cast<uint4*>(to + (chunk * kGroupRows + row % kGroupRows) * 128 + (piece % 8 ^ row % 8) * 16) = value;
  }
  shared_writes_fence();
}

// Clears the values of a tile that are not there: they may be anything, and 0 * NaN is NaN. By the `threads` threads that have the
// tile.
template <int D>
__device__ inline void clear_rows(const Segment& s, char* values, int key0, int barrier, int threads) {
  if (key0 >= s.span.begin && key0 + kTileKeys <= s.span.end) {
    return;
  }
  sync_some(barrier, threads);
  for (int index = static_cast<int>(threadIdx.x) % threads; index < kTileKeys * (D / 8); index += threads) {
    const int row = index / (D / 8);
    const int piece = index % (D / 8);
    if (key0 + row < s.span.begin || key0 + row >= s.span.end) {
      *reinterpret_cast<uint4*>(values + (piece / 8 * kTileKeys + row) * 128 + piece % 8 * 16) = make_uint4(0, 0, 0, 0);
    }
  }
  shared_writes_fence();
  sync_some(barrier, threads);
}

// A thread's part of two rows that are 8 apart: columns 2c and 2c + 1 of every 8, not yet divided by `sum`.
template <int D>
struct Rows {
  float out[D / 2] = {};
  float peak[2] = {-kInfinity, -kInfinity};  // in units of log2(e)
  float sum[2] = {0, 0};

  __device__ void shrink(int half, float factor) {
    sum[half] *= factor;
#pragma unroll
    for (int j = 0; j < D / 8; ++j) {
      out[j * 4 + half * 2] *= factor;
      out[j * 4 + half * 2 + 1] *= factor;
    }
  }

  // Leaves them in shared memory, or adds what another has left there.
  __device__ void leave(float* results, float* scales, int row, int pitch) const {
    const int c = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int mine = row + half * 8;
#pragma unroll
      for (int j = 0; j < D / 8; ++j) {
        *reinterpret_cast<float2*>(results + mine * pitch + j * 8 + 2 * c) =
            make_float2(out[j * 4 + half * 2], out[j * 4 + half * 2 + 1]);
      }
      if (c == 0) {
        *reinterpret_cast<float2*>(scales + mine * 2) = make_float2(peak[half], sum[half]);
      }
    }
  }
  __device__ void add(const float* results, const float* scales, int row, int pitch) {
    const int c = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int mine = row + half * 8;
      const float2 scale = *reinterpret_cast<const float2*>(scales + mine * 2);
      const float top = nan_max(peak[half], scale.x);
      const float theirs = shrinking_approx(scale.x, top);
      shrink(half, shrinking_approx(peak[half], top));
      peak[half] = top;
      sum[half] += theirs * scale.y;
#pragma unroll
      for (int j = 0; j < D / 8; ++j) {
        const float2 other = *reinterpret_cast<const float2*>(results + mine * pitch + j * 8 + 2 * c);
        out[j * 4 + half * 2] += theirs * other.x;
        out[j * 4 + half * 2 + 1] += theirs * other.y;
      }
    }
  }

  template <typename T>
  __device__ void write(const DecodeParams& p, const Segment& s, int row) const {
    const int c = threadIdx.x % 4;
    const bool odd = c % 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int mine = row + half * 8;
      // Two lanes have four adjacent columns: each takes those of every second 8.
#pragma unroll
      for (int j = 0; j < D / 8; j += 2) {
        const float2 first = make_float2(out[j * 4 + half * 2], out[j * 4 + 1 + half * 2]);
        const float2 second = make_float2(out[j * 4 + 4 + half * 2], out[j * 4 + 5 + half * 2]);
        const float2 given = odd ? first : second;
        const float2 got = make_float2(__shfl_xor_sync(~0u, given.x, 1), __shfl_xor_sync(~0u, given.y, 1));
        const int column = (odd ? j + 1 : j) * 8 + c / 2 * 4;
        if (mine < s.rows && column < p.value_dim) {
          write_result<T>(
              p, s, mine, column,
              {peak[half], sum[half],
               odd ? make_float4(got.x, got.y, second.x, second.y) : make_float4(first.x, first.y, got.x, got.y)});
        }
      }
    }
  }
};

// One tile's scores become weights, and what has been summed so far shrinks to their unit. `row`, `key0`: the lane's first row and
// the tile's first key.
template <typename T, int D>
__device__ inline void weigh(
    const DecodeParams& p,
    const Segment& s,
    float (&scores)[kTileKeys / 2],
    int row,
    int key0,
    Rows<D>& rows,
    unsigned (&weights)[kTileKeys / 16][4]) {
  auto* blocks = reinterpret_cast<float (*)[4]>(scores);
  const float unit = restrict_tile<T, kTileKeys / 8>(p, s, blocks, row, key0);
  float base[2];
  find_peaks<kTileKeys / 8>(blocks, unit, rows.peak, base);
  if (__any_sync(~0u, base[0] > rows.peak[0] || base[1] > rows.peak[1])) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows.shrink(half, shrinking_approx(rows.peak[half], base[half]));
      rows.peak[half] = base[half];
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float zero = base[half] == -kInfinity ? 0.0f : base[half];
    float total = 0;
#pragma unroll
    for (int j = 0; j < kTileKeys / 8; ++j) {
      const float low = exp2_approx(fmaf(scores[j * 4 + half * 2], unit, -zero));
      const float high = exp2_approx(fmaf(scores[j * 4 + half * 2 + 1], unit, -zero));
      total += low + high;
      weights[j / 2][j % 2 * 2 + half] = pack(low, high, T{});
    }
    rows.sum[half] += total;
  }
}

// Begins Q K^T of a tile for a group's 64 rows.
template <typename T, int D>
__device__ inline void begin_scores(float (&scores)[kTileKeys / 2], const char* queries, const char* keys) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < D / 16; ++step) {
    const auto a = descriptor(queries + step / 4 * kGroupRows * 128 + step % 4 * 32);
    const auto b = descriptor(keys + step / 4 * kTileKeys * 128 + step % 4 * 32);
    wgmma_shared(scores, a, b, step > 0, T{});
  }
  wgmma_commit();
}

// Begins to add the weighted values.
template <typename T, int D>
__device__ inline void begin_values(Rows<D>& rows, const unsigned (&weights)[kTileKeys / 16][4], const char* values) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kTileKeys / 16; ++step) {
    wgmma_registers(rows.out, weights[step], descriptor(values + step * 2048, kTileKeys * 128), T{});
  }
  wgmma_commit();
}

template <typename T, int D>
__device__ inline void consume(const DecodeParams& p, const Shared<D>& shared) {
  constexpr int kStages = Shared<D>::kStages;
  const int group = static_cast<int>(threadIdx.x) / 128;
  const int slices = kGroups / p.row_warps;
  const int slice = slices == 1 ? 0 : group;
  const int row_group = slices == 1 ? group : 0;
  const int row = row_group * kGroupRows + static_cast<int>(threadIdx.x) % 128 / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4;
  const char* queries = shared.queries + row_group * Shared<D>::kTraits.query_bytes();

  Segments segments(p);
  Segment s;
  int first_turn = 0;  // tiles that the pipeline has loaded before
  for (; segments.next(s); first_turn += s.tiles) {
    sync_some(1, kConsumers);  // the last unit's queries and results are free
    load_queries<T, D>(p, s, shared.queries);
    sync_some(1, kConsumers);

    Rows<D> rows;
    int last_stage = 0;
#pragma unroll 1
    for (int i = slice; i < s.tiles; i += slices) {
      const int turn = first_turn + i;
      const int stage = turn % kStages;
      const int key0 = s.first + i * kTileKeys;
      barrier_wait(shared.full + stage, parity<kStages>(turn));
      float scores[kTileKeys / 2];
      begin_scores<T, D>(scores, queries, shared.keys(stage));
      if (i >= slices) {  // meanwhile the last tile's values have been added
        wgmma_wait<1>();
        barrier_arrive(shared.empty + last_stage);
      }
      last_stage = stage;
      wgmma_wait<0>();
      unsigned weights[kTileKeys / 16][4];
      weigh<T, D>(p, s, scores, row, key0, rows, weights);
      clear_rows<D>(s, shared.values(stage), key0, 2 + slice, p.row_warps * 128);
      begin_values<T, D>(rows, weights, shared.values(stage));
    }
    wgmma_wait<0>();
    if (slice < s.tiles) {
      barrier_arrive(shared.empty + last_stage);
    }
    rows.sum[0] = quad_sum(rows.sum[0]);
    rows.sum[1] = quad_sum(rows.sum[1]);
    if (slices > 1) {
      if (slice == 1) {
        rows.leave(shared.results, shared.scales, row, Shared<D>::kPitch);
      }
      sync_some(1, kConsumers);
      if (slice == 1) {
        continue;
      }
      rows.add(shared.results, shared.scales, row, Shared<D>::kPitch);
    }
    rows.template write<T>(p, s, row);
  }
}

template <typename T, int D>
__device__ inline void decode(const DecodeParams& p, const TensorMap* k_map, const TensorMap* v_map) {
  extern __shared__ __align__(1024) char memory[];
  const Shared<D> shared(memory, p.row_warps);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Shared<D>::kStages; ++stage) {
      barrier_init(shared.full + stage, 1);
      barrier_init(shared.empty + stage, p.row_warps * 128);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x >= kConsumers) {
    give_registers<40>();
    if (threadIdx.x < kConsumers + 32) {
      produce<D>(p, shared, k_map, v_map);
    }
  } else {
    take_registers<232>();
    consume<T, D>(p, shared);
  }
}

}  // namespace mlx_cuda

#define MLX_CUDA_DECODE_SM90(name, dtype, D)                                                                   \
  extern "C" __global__ void __launch_bounds__(mlx_cuda::Sm90Traits::kThreads, 1) name(                        \
      const __grid_constant__ mlx_cuda::DecodeParams params, const __grid_constant__ mlx_cuda::TensorMap keys, \
      const __grid_constant__ mlx_cuda::TensorMap values) {                                                    \
    mlx_cuda::begin_pdl();                                                                                     \
    mlx_cuda::decode<mlx_cuda::types::dtype, D>(params, &keys, &values);                                       \
  }
MLX_CUDA_DECODE_SM90_KERNELS(MLX_CUDA_DECODE_SM90)
