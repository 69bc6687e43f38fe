// Attention of many queries on Hopper: FlashAttention (arXiv:2205.14135, arXiv:2407.08608) with wgmma and the bulk tensor copy
// engine.
//
// A block takes 64 rows of queries for each of its consumer warpgroups, which share the tiles of keys and values that one producer
// warp copies into a ring of two stages. While the scores of the next tile are computed, the tensor cores add the last tile's
// weighted values. Tiles that a window, lengths or a mask hide from all rows are never copied; only tiles that they cut pay for it.
// The biased kernels have tiles of an additive mask in the ring as well.
#include "attention/flash/scores.cuh"
#include "device/pipeline.cuh"
#include "device/wgmma.cuh"

namespace mlx_cuda {

constexpr int kStages = 2;

template <int D, int KN, int Groups, FlashKind Kind>
struct Shared {
  static constexpr int kChunk = 64;  // columns that lie in 128 adjacent bytes
  static constexpr int kQueryBytes = Groups * 64 * D * 2;
  static constexpr int kTileBytes = KN * D * 2;
  static constexpr int kBiasBytes = Kind == FlashKind::biased ? Groups * 64 * KN * 2 : 0;
  static constexpr int kBytes = kQueryBytes + kStages * (2 * kTileBytes + kBiasBytes) + 1024 + 128;

  char* queries;
  char* keys;
  char* values;
  char* bias;
  Barrier* queries_full;
  Barrier* queries_empty;
  Barrier* keys_full;
  Barrier* keys_empty;
  Barrier* values_full;
  Barrier* values_empty;
  Barrier* bias_full;
  Barrier* bias_empty;

  __device__ explicit Shared(char* memory) {
    char* base = memory + (1024 - shared_address(memory) % 1024) % 1024;
    queries = base;
    keys = queries + kQueryBytes;
    values = keys + kStages * kTileBytes;
    bias = values + kStages * kTileBytes;
    queries_full = reinterpret_cast<Barrier*>(bias + kStages * kBiasBytes);
    queries_empty = queries_full + 1;
    keys_full = queries_empty + 1;
    keys_empty = keys_full + kStages;
    values_full = keys_empty + kStages;
    values_empty = values_full + kStages;
    bias_full = values_empty + kStages;
    bias_empty = bias_full + kStages;
  }
};

// Rows of a tile of values that are not there may hold anything, and 0 * NaN is NaN.
template <int D, int KN, int Groups>
__device__ inline void clear_rows(char* tile, int begin, int end) {
  sync_some(1, Groups * 128);
  const int thread = static_cast<int>(threadIdx.x) - 128;
  for (int i = thread; i < KN * (D / 8); i += Groups * 128) {
    const int row = i / (D / 8);
    if (row < begin || row >= end) {
      const int column = i % (D / 8);
      *reinterpret_cast<uint4*>(tile + column / 8 * KN * 128 + row * 128 + column % 8 * 16) = make_uint4(0, 0, 0, 0);
    }
  }
  shared_writes_fence();
  sync_some(1, Groups * 128);
}

// How often the ring of tiles, and the queries' place, have been filled so far: the same for producer and consumers.
struct Turn {
  int block = 0;
  int tile = 0;

  __device__ int stage() const {
    return tile % kStages;
  }
  __device__ int parity() const {
    return tile / kStages % 2;
  }
};

struct Maps {
  const TensorMap* queries;
  const TensorMap* keys;
  const TensorMap* values;
  const TensorMap* bias;
};

template <typename T, int D, int KN, int Groups, FlashKind Kind>
__device__ inline void produce(
    const FlashParams& p,
    const Place& place,
    const Tiles& tiles,
    const Shared<D, KN, Groups, Kind>& shared,
    const Maps& maps,
    Turn& turn) {
  using Memory = Shared<D, KN, Groups, Kind>;
  const int kv_head = place.head / (p.heads / p.kv_heads);
  const int q_batch = p.cu_q ? 0 : place.batch;
  const int kv_batch = p.cu_k ? 0 : place.batch;
  const int count = tiles.count();
  if (count == 0) {
    return;
  }
  auto copy = [&](char* to, const TensorMap* map, Barrier* full, int row, int head, int batch, int rows) {
    barrier_expect(full, rows * D * 2);
#pragma unroll
    for (int chunk = 0; chunk < D / Memory::kChunk; ++chunk) {
      copy_box(to + chunk * rows * 128, map, full, chunk * Memory::kChunk, row, head, batch);
    }
  };
  // A mask that is the same for all rows has one in the box.
  auto copy_bias = [&](int stage, int key) {
    const bool own_rows = p.mask.strides[2] != 0;
    Barrier* full = shared.bias_full + stage;
    barrier_expect(full, (own_rows ? Groups * 64 : 1) * KN * 2);
#pragma unroll
    for (int chunk = 0; chunk < KN / Memory::kChunk; ++chunk) {
      copy_box(
          shared.bias + stage * Memory::kBiasBytes + chunk * Groups * 64 * 128, maps.bias, full, key + chunk * Memory::kChunk,
          own_rows ? place.row0 : 0, p.mask.strides[1] != 0 ? place.head : 0, p.mask.strides[0] != 0 ? place.batch : 0);
    }
  };
  barrier_wait(shared.queries_empty, turn.block % 2 ^ 1);
  copy(shared.queries, maps.queries, shared.queries_full, place.q_offset + place.row0, place.head, q_batch, Groups * 64);
  ++turn.block;
  for (int i = 0; i < count; ++i, ++turn.tile) {
    const int stage = turn.stage();
    const int parity = turn.parity();
    const int row = place.k_offset + tiles.tile(i) * KN;
    barrier_wait(shared.keys_empty + stage, parity ^ 1);
    copy(shared.keys + stage * Memory::kTileBytes, maps.keys, shared.keys_full + stage, row, kv_head, kv_batch, KN);
    if constexpr (Kind == FlashKind::biased) {
      barrier_wait(shared.bias_empty + stage, parity ^ 1);
      copy_bias(stage, tiles.tile(i) * KN);
    }
    barrier_wait(shared.values_empty + stage, parity ^ 1);
    copy(shared.values + stage * Memory::kTileBytes, maps.values, shared.values_full + stage, row, kv_head, kv_batch, KN);
  }
}

// Warpgroups put their products on the tensor cores in turns, so that one computes its weights while another multiplies.
template <int Groups>
struct Order {
  static constexpr int kFirst = 2;  // number of the first group's barrier
  int group;

  __device__ explicit Order(int group) : group(group) {
    if (group == Groups - 1) {
      pass();
    }
  }
  __device__ void take() const {
    sync_some(kFirst + group, 256);
  }
  __device__ void pass() const {
    arrive_some(kFirst + (group + 1) % Groups, 256);
  }
};

template <typename T, int D, int KN, int Groups, FlashKind Kind>
__device__ inline void consume(
    const FlashParams& p,
    const Place& place,
    const Tiles& tiles,
    const Shared<D, KN, Groups, Kind>& shared,
    const Order<Groups>& order,
    Turn& turn) {
  using Memory = Shared<D, KN, Groups, Kind>;
  const int lane = threadIdx.x % 32;
  constexpr bool General = Kind == FlashKind::general;
  const int group = order.group;
  const int row0 = place.row0 + group * 64;
  const int rows[2] = {
      row0 + static_cast<int>(threadIdx.x) % 128 / 32 * 16 + lane / 4,
      row0 + static_cast<int>(threadIdx.x) % 128 / 32 * 16 + lane / 4 + 8};
  const int lows[2] = {place.lowest(p, rows[0]), place.lowest(p, rows[1])};
  const int highs[2] = {place.highest(p, rows[0]), place.highest(p, rows[1])};
  const int whole_from = place.lowest(p, min(row0 + 63, place.rows - 1));
  const int whole_to = place.highest(p, row0);
  const bool ragged = p.starts || p.ends || p.cu_k;
  float out[D / 2];
  float peak[2] = {-kInfinity, -kInfinity};  // raw or in units of log2(e), as `unit` says
  float sum[2] = {0, 0};                     // of this thread's columns
  float unit = p.scale * kLog2e;
  TileBias<T, KN, Groups * 64> bias;
  if constexpr (Kind == FlashKind::biased) {
    bias = {p, place, rows};
    peak[0] = peak[1] = bias.first_peak();
    unit = bias.unit_of_scores();
  }
  unsigned weights[KN / 16][4];
#pragma unroll
  for (int i = 0; i < D / 2; ++i) {
    out[i] = 0;
  }

  const char* my_queries = shared.queries + group * 64 * 128;
  auto score = [&](float (&scores)[KN / 2], int stage) {
    const char* tile = shared.keys + stage * Memory::kTileBytes;
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
      const auto a = descriptor(my_queries + step / 4 * Groups * 64 * 128 + step % 4 * 32);
      const auto b = descriptor(tile + step / 4 * KN * 128 + step % 4 * 32);
      wgmma_shared(scores, a, b, step > 0, T{});
    }
    wgmma_commit();
  };
  auto add_values = [&](int stage) {
    const char* tile = shared.values + stage * Memory::kTileBytes;
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < KN / 16; ++step) {
      wgmma_registers(out, weights[step], descriptor(tile + step * 2048, KN * 128), T{});
    }
    wgmma_commit();
  };
  // Scores of the turn's tile become weights in place; says by how much what has been summed so far shrinks.
  auto soften = [&](float (&scores)[KN / 2], int i, float (&shrink)[2]) {
    if constexpr (Kind == FlashKind::biased) {
      barrier_wait(shared.bias_full + turn.stage(), turn.parity());
      if (tiles.masked(i)) {
        bias.add(scores, shared.bias + turn.stage() * Memory::kBiasBytes);
      } else {
        bias.add_nothing(scores);
      }
      barrier_arrive(shared.bias_empty + turn.stage());
    }
    const int key0 = tiles.tile(i) * KN;
    const bool whole = key0 >= whole_from && key0 + KN <= whole_to;
    const float restricted =
        restrict_scores<T, KN, Kind>(p, place, scores, key0, rows, lows, highs, whole, General && tiles.masked(i));
    unit = Kind == FlashKind::biased ? unit : restricted;
    const float peak_unit = General ? 1.0f : unit;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = scores[half * 2];
#pragma unroll
      for (int j = 0; j < KN / 8; ++j) {
        top = fmaxf(top, fmaxf(scores[j * 4 + half * 2], scores[j * 4 + half * 2 + 1]));
      }
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      // Masks make some tiles raw and some not: peaks of the general kernel are in units of log2(e).
      top = fmaxf(General ? top * unit : top, peak[half]);
      shrink[half] = top == -kInfinity ? 1.0f : exp2_approx((peak[half] - top) * peak_unit);
      peak[half] = top;
      const float zero = top == -kInfinity ? 0.0f : top * peak_unit;
      float total = 0;
#pragma unroll
      for (int j = 0; j < KN / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[j * 4 + half * 2 + e];
          score = exp2_approx(fmaf(score, unit, -zero));
          total += score;
        }
      }
      sum[half] = sum[half] * shrink[half] + total;
    }
  };
  auto keep = [&](const float (&scores)[KN / 2]) {
#pragma unroll
    for (int step = 0; step < KN / 16; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        weights[step][i] = pack(scores[step * 8 + i * 2], scores[step * 8 + i * 2 + 1], T{});
      }
    }
  };
  auto values_ready = [&](int i, const Turn& at) {
    char* tile = shared.values + at.stage() * Memory::kTileBytes;
    barrier_wait(shared.values_full + at.stage(), at.parity());
    const int key0 = tiles.tile(i) * KN;
    if (ragged && (key0 < place.begin || key0 + KN > place.end)) {
      clear_rows<D, KN, Groups>(tile, place.begin - key0, place.end - key0);
    }
  };

  const int count = tiles.count();
  if (count > 0) {
    barrier_wait(shared.queries_full, turn.block % 2);
    float shrink[2];
    {
      float scores[KN / 2];
      barrier_wait(shared.keys_full + turn.stage(), turn.parity());
      score(scores, turn.stage());
      wgmma_wait<0>();
      barrier_arrive(shared.keys_empty + turn.stage());
      soften(scores, 0, shrink);
      keep(scores);
    }
    for (int i = 1; i < count; ++i) {
      const Turn last = turn;
      ++turn.tile;
      float scores[KN / 2];
      barrier_wait(shared.keys_full + turn.stage(), turn.parity());
      values_ready(i - 1, last);
      order.take();
      score(scores, turn.stage());
      add_values(last.stage());
      order.pass();
      wgmma_wait<1>();
      barrier_arrive(shared.keys_empty + turn.stage());
      soften(scores, i, shrink);
      wgmma_wait<0>();
      barrier_arrive(shared.values_empty + last.stage());
#pragma unroll
      for (int j = 0; j < D / 8; ++j) {
        out[j * 4] *= shrink[0];
        out[j * 4 + 1] *= shrink[0];
        out[j * 4 + 2] *= shrink[1];
        out[j * 4 + 3] *= shrink[1];
      }
      keep(scores);
    }
    barrier_arrive(shared.queries_empty);
    values_ready(count - 1, turn);
    add_values(turn.stage());
    wgmma_wait<0>();
    barrier_arrive(shared.values_empty + turn.stage());
    ++turn.tile;
    ++turn.block;
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float total = sum[half];
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    float top = peak[half] == -kInfinity || General ? peak[half] : peak[half] * unit;
    float factor = 1.0f;
    if (p.sinks) {
      const float sink = kLog2e * to_float(static_cast<const T*>(p.sinks)[place.head]);
      const float higher = fmaxf(top, sink);
      factor = top == -kInfinity ? 0.0f : exp2f(top - higher);
      total = total * factor + exp2f(sink - higher);
      top = higher;
    }
    const int row = rows[half];
    const bool there = row < place.rows;
    if (p.lse && there && lane % 4 == 0) {
      const long long batch_part = p.cu_q ? place.q_offset : place.batch * p.lse_strides[0];
      p.lse[batch_part + place.head * p.lse_strides[1] + row] = top == -kInfinity ? top : (top + log2f(total)) * kLn2;
    }
    factor = total > 0 ? factor / total : total == 0 ? 0.0f : total;  // NaN stays
    T* to = static_cast<T*>(p.out) + (p.cu_q ? 0 : place.batch * p.out_strides.batch) + place.head * p.out_strides.head +
            static_cast<long long>(place.q_offset + row) * p.out_strides.row;
    // The four lanes of a row have 2 columns of each 8: each takes 8 adjacent ones.
#pragma unroll
    for (int block = 0; block < D / 32; ++block) {
      unsigned mine[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int at = (block * 4 + j) * 4 + half * 2;
        mine[j] = pack(out[at] * factor, out[at + 1] * factor, T{});
      }
      exchange(mine);
      const int column = block * 32 + lane % 4 * 8;
      if (there && column < p.v_head_dim) {
        *reinterpret_cast<uint4*>(to + column) = make_uint4(mine[0], mine[1], mine[2], mine[3]);
      }
    }
  }
}

template <typename T, int D, int KN, int Groups, FlashKind Kind>
__device__ inline void flash(const FlashParams& p, const Maps& maps) {
  using Memory = Shared<D, KN, Groups, Kind>;
  static_assert(Memory::kBytes <= 227 * 1024);  // what a block on Hopper may have
  extern __shared__ char memory[];
  const Memory shared(memory);
  constexpr bool masked = Kind == FlashKind::general || Kind == FlashKind::biased;
  if (threadIdx.x == 0) {
    barrier_init(shared.queries_full, 1);
    barrier_init(shared.queries_empty, Groups * 128);
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(shared.keys_full + stage, 1);
      barrier_init(shared.values_full + stage, 1);
      barrier_init(shared.keys_empty + stage, Groups * 128);
      barrier_init(shared.values_empty + stage, Groups * 128);
      barrier_init(shared.bias_full + stage, 1);
      barrier_init(shared.bias_empty + stage, Groups * 128);
    }
    barrier_init_fence();
  }
  __syncthreads();
  const int group = static_cast<int>(threadIdx.x) / 128 - 1;
  constexpr int kConsumerRegisters = Groups == 2 ? 240 : 160;
  constexpr int kProducerRegisters = Groups == 2 ? 24 : 32;
  Turn turn;
  if (group < 0) {
    give_registers<kProducerRegisters>();
    if (threadIdx.x == 0) {
      for_each_piece(p, Groups * 64, KN, masked, [&](const Place& place, const Tiles& tiles) {
        produce<T>(p, place, tiles, shared, maps, turn);
      });
    }
  } else {
    take_registers<kConsumerRegisters>();
    const Order<Groups> order(group);
    for_each_piece(p, Groups * 64, KN, masked, [&](const Place& place, const Tiles& tiles) {
      consume<T>(p, place, tiles, shared, order, turn);
    });
  }
}

}  // namespace mlx_cuda

#define MLX_CUDA_FLASH_MAP const __grid_constant__ mlx_cuda::TensorMap
#define MLX_CUDA_FLASH_KERNEL(name, T, D, KN, GROUPS, KIND)                                                      \
  extern "C" __global__ void __launch_bounds__(128 * (GROUPS + 1), 1) name(                                      \
      const __grid_constant__ mlx_cuda::FlashParams params, MLX_CUDA_FLASH_MAP queries, MLX_CUDA_FLASH_MAP keys, \
      MLX_CUDA_FLASH_MAP values) {                                                                               \
    mlx_cuda::flash<T, D, KN, GROUPS, mlx_cuda::FlashKind::KIND>(params, {&queries, &keys, &values, nullptr});   \
  }
#define MLX_CUDA_FLASH_BIASED(dtype, T, D, KN, GROUPS)                                                           \
  extern "C" __global__ void __launch_bounds__(128 * (GROUPS + 1), 1) flash_##dtype##_##D##_biased(              \
      const __grid_constant__ mlx_cuda::FlashParams params, MLX_CUDA_FLASH_MAP queries, MLX_CUDA_FLASH_MAP keys, \
      MLX_CUDA_FLASH_MAP values, MLX_CUDA_FLASH_MAP bias) {                                                      \
    mlx_cuda::flash<T, D, KN, GROUPS, mlx_cuda::FlashKind::biased>(params, {&queries, &keys, &values, &bias});   \
  }

// The same numbers as in attention/flash/plan_sm90.cpp.
#define MLX_CUDA_FLASH(dtype, T, D, KN, GROUPS)                                 \
  MLX_CUDA_FLASH_KERNEL(flash_##dtype##_##D##_plain, T, D, KN, GROUPS, plain)   \
  MLX_CUDA_FLASH_KERNEL(flash_##dtype##_##D##_capped, T, D, KN, GROUPS, capped) \
  MLX_CUDA_FLASH_KERNEL(flash_##dtype##_##D##_general, T, D, KN, GROUPS, general)

#define MLX_CUDA_FLASH_ALL(dtype, T)          \
  MLX_CUDA_FLASH(dtype, T, 64, 128, 3)        \
  MLX_CUDA_FLASH(dtype, T, 128, 128, 2)       \
  MLX_CUDA_FLASH(dtype, T, 192, 96, 2)        \
  MLX_CUDA_FLASH(dtype, T, 256, 64, 2)        \
  MLX_CUDA_FLASH_BIASED(dtype, T, 64, 128, 3) \
  MLX_CUDA_FLASH_BIASED(dtype, T, 128, 128, 2)

#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // what it is made of exists there only
MLX_CUDA_FLASH_ALL(bfloat16, __nv_bfloat16)
MLX_CUDA_FLASH_ALL(float16, __half)
#endif
