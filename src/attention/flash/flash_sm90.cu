// Attention of many queries on Hopper: FlashAttention (arXiv:2205.14135, arXiv:2407.08608) with wgmma and the bulk tensor copy
// engine.
//
// A block takes 64 rows of queries for each of its consumer warpgroups, which share the tiles of keys and values that one producer
// warp copies into a ring of two stages. While the scores of the next tile are computed, the tensor cores add the last tile's
// weighted values. Tiles that a window, lengths or a mask hide from all rows are never copied; only tiles that they cut pay for it.
// The biased kernels have tiles of an additive mask in the ring as well.
#include "attention/flash/kernels.h"
#include "attention/flash/scores_sm90.cuh"
#include "attention/flash/tiles.cuh"
#include "device/pipeline.cuh"
#include "device/wgmma.cuh"

namespace mlx_cuda {

template <typename Element, FlashSm90Shape Shape, FlashKind Kind>
struct Traits {
  using T = Element;
  static constexpr FlashKind kKind = Kind;
  static constexpr bool kGeneral = Kind == FlashKind::general;
  static constexpr bool kBiased = Kind == FlashKind::biased;
  static constexpr int kStages = Shape.kStages;
  static constexpr int kHeadDim = Shape.head_dim;
  static constexpr int kKeys = Shape.keys;
  static constexpr int kRows = Shape.rows();
  static constexpr int kGroups = Shape.consumers;
  static constexpr int kThreads = Shape.threads();
  static constexpr int kConsumers = kGroups * 128;  // threads
  static constexpr int kQueryBytes = Shape.query_bytes();
  static constexpr int kTileBytes = Shape.tile_bytes();
  static constexpr int kBiasBytes = Shape.bias_bytes(Kind);
  static constexpr int kChunk = 64;  // columns that lie in 128 adjacent bytes
  static constexpr int kConsumerRegisters = kGroups == 2 ? 240 : 160;
  static constexpr int kProducerRegisters = kGroups == 2 ? 24 : 32;
  static_assert(Shape.shared_bytes(Kind) <= 227 * 1024);  // what a block on Hopper may have
};

template <typename Traits>
struct Shared {
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
    constexpr int stages = Traits::kStages;
    queries = memory + (1024 - shared_address(memory) % 1024) % 1024;
    keys = queries + Traits::kQueryBytes;
    values = keys + stages * Traits::kTileBytes;
    bias = values + stages * Traits::kTileBytes;
    queries_full = reinterpret_cast<Barrier*>(bias + stages * Traits::kBiasBytes);
    queries_empty = queries_full + 1;
    keys_full = queries_empty + 1;
    keys_empty = keys_full + stages;
    values_full = keys_empty + stages;
    values_empty = values_full + stages;
    bias_full = values_empty + stages;
    bias_empty = bias_full + stages;
  }

  __device__ void init_barriers() const {
    auto init = [](Barrier* full, Barrier* empty, int count) {
      for (int i = 0; i < count; ++i) {
        barrier_init(full + i, 1);
        barrier_init(empty + i, Traits::kConsumers);
      }
    };
    init(queries_full, queries_empty, 1);
    init(keys_full, keys_empty, Traits::kStages);
    init(values_full, values_empty, Traits::kStages);
    init(bias_full, bias_empty, Traits::kStages);
    barrier_init_fence();
  }
};

// How often the ring of tiles, and the queries' place, have been filled so far: the same for producer and consumers.
template <typename Traits>
struct Turn {
  int block = 0;
  int tile = 0;

  __device__ int stage() const {
    return tile % Traits::kStages;
  }
  __device__ int parity() const {
    return tile / Traits::kStages % 2;
  }
};

struct Maps {
  const TensorMap* queries;
  const TensorMap* keys;
  const TensorMap* values;
  const TensorMap* bias;
};

// Rows of one head, in chunks of columns.
template <typename Traits>
__device__ inline void copy_rows(char* to, const TensorMap* map, Barrier* full, int row, int head, int batch, int rows) {
  barrier_expect(full, rows * Traits::kHeadDim * 2);
#pragma unroll
  for (int chunk = 0; chunk < Traits::kHeadDim / Traits::kChunk; ++chunk) {
    copy_box(to + chunk * rows * 128, map, full, chunk * Traits::kChunk, row, head, batch);
  }
}

// A mask that is the same for all rows has one in the box.
template <typename Traits>
__device__ inline void copy_bias(
    const FlashParams& p, const Place& place, const Shared<Traits>& shared, const TensorMap* map, int stage, int key) {
  const bool own_rows = p.mask.strides[2] != 0;
  Barrier* full = shared.bias_full + stage;
  barrier_expect(full, (own_rows ? Traits::kRows : 1) * Traits::kKeys * 2);
#pragma unroll
  for (int chunk = 0; chunk < Traits::kKeys / Traits::kChunk; ++chunk) {
    copy_box(
        shared.bias + stage * Traits::kBiasBytes + chunk * Traits::kRows * 128, map, full, key + chunk * Traits::kChunk,
        own_rows ? place.row0 : 0, p.mask.strides[1] != 0 ? place.head : 0, p.mask.strides[0] != 0 ? place.batch : 0);
  }
}

template <typename Traits>
__device__ inline void produce(
    const FlashParams& p,
    const Place& place,
    const Tiles& tiles,
    const Shared<Traits>& shared,
    const Maps& maps,
    Turn<Traits>& turn) {
  if (tiles.first >= tiles.last) {
    return;
  }
  const int kv_head = place.head / (p.heads / p.kv_heads);
  const int q_batch = p.cu_q ? 0 : place.batch;
  const int kv_batch = p.cu_k ? 0 : place.batch;
  barrier_wait(shared.queries_empty, turn.block % 2 ^ 1);
  copy_rows<Traits>(
      shared.queries, maps.queries, shared.queries_full, place.q_offset + place.row0, place.head, q_batch, Traits::kRows);
  ++turn.block;
  for (int i = tiles.first; i < tiles.last; ++i, ++turn.tile) {
    const int stage = turn.stage();
    const int key0 = tiles[i].index * Traits::kKeys;
    auto copy = [&](char* to, const TensorMap* map, Barrier* full, Barrier* empty) {
      barrier_wait(empty + stage, turn.parity() ^ 1);
      copy_rows<Traits>(
          to + stage * Traits::kTileBytes, map, full + stage, place.k_offset + key0, kv_head, kv_batch, Traits::kKeys);
    };
    copy(shared.keys, maps.keys, shared.keys_full, shared.keys_empty);
    if constexpr (Traits::kBiased) {
      barrier_wait(shared.bias_empty + stage, turn.parity() ^ 1);
      copy_bias(p, place, shared, maps.bias, stage, key0);
    }
    copy(shared.values, maps.values, shared.values_full, shared.values_empty);
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

// The part of a piece that one consumer warpgroup has. Arrays stand outside, so that all else is in registers at once.
template <typename Traits>
class Consumer {
  using T = typename Traits::T;
  static constexpr int kKeys = Traits::kKeys;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr bool kGeneral = Traits::kGeneral;

 public:
  using Scores = float[kKeys / 2];
  using Weights = unsigned[kKeys / 16][4];
  using Out = float[kHeadDim / 2];

  // Of the two rows of this thread.
  struct Sums {
    float peak[2];  // raw or in units of log2(e), as `unit` says
    float sum[2];   // of this thread's columns
    float unit;
  };

  __device__ Consumer(const FlashParams& p, const Place& place, const Tiles& tiles, const Shared<Traits>& shared, int group)
      : p(p), place(place), tiles(tiles), shared(shared), queries(shared.queries + group * 64 * 128) {
    const int row0 = place.row0 + group * 64;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows[half] = row0 + static_cast<int>(threadIdx.x) % 128 / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4 + half * 8;
      lows[half] = place.lowest(rows[half]);
      highs[half] = place.highest(rows[half]);
    }
    whole_from = place.lowest(min(row0 + 63, place.rows - 1));
    whole_to = place.highest(row0);
    ragged = p.starts || p.ends || p.cu_k;
    if constexpr (Traits::kBiased) {
      bias = {p, place, rows};
    }
  }

  __device__ void clear(Out& out, Sums& sums) const {
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) {
      out[i] = 0;
    }
    sums = {{-kInfinity, -kInfinity}, {0, 0}, p.scale * kLog2e};
    if constexpr (Traits::kBiased) {
      sums.peak[0] = sums.peak[1] = bias.first_peak();
      sums.unit = bias.unit_of_scores();
    }
  }

  // Begins Q K^T of a tile.
  __device__ void score(Scores& scores, int stage) const {
    const char* tile = shared.keys + stage * Traits::kTileBytes;
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      const auto a = descriptor(queries + step / 4 * Traits::kRows * 128 + step % 4 * 32);
      const auto b = descriptor(tile + step / 4 * kKeys * 128 + step % 4 * 32);
      wgmma_shared(scores, a, b, step > 0, T{});
    }
    wgmma_commit();
  }

  // Begins P V of a tile.
  __device__ void add_values(Out& out, const Weights& weights, int stage) const {
    const char* tile = shared.values + stage * Traits::kTileBytes;
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      wgmma_registers(out, weights[step], descriptor(tile + step * 2048, kKeys * 128), T{});
    }
    wgmma_commit();
  }

  // Scores of the turn's tile become weights in place; says by how much what has been summed so far shrinks.
  __device__ void soften(Scores& scores, int i, const Turn<Traits>& turn, Sums& sums, float (&shrink)[2]) const {
    const Tile tile = tiles[i];
    if constexpr (Traits::kBiased) {
      add_bias(scores, tile.masked, turn);
    }
    const int key0 = tile.index * kKeys;
    const bool whole = key0 >= whole_from && key0 + kKeys <= whole_to;
    const float restricted =
        restrict_scores<T, kKeys, Traits::kKind>(p, place, scores, key0, rows, lows, highs, whole, kGeneral && tile.masked);
    sums.unit = Traits::kBiased ? sums.unit : restricted;
    // Masks make some tiles raw and some not: peaks of the general kernel are in units of log2(e).
    const float peak_unit = kGeneral ? 1.0f : sums.unit;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = scores[half * 2];
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
        top = fmaxf(top, fmaxf(scores[j * 4 + half * 2], scores[j * 4 + half * 2 + 1]));
      }
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      top = fmaxf(kGeneral ? top * sums.unit : top, sums.peak[half]);
      shrink[half] = top == -kInfinity ? 1.0f : exp2_approx((sums.peak[half] - top) * peak_unit);
      sums.peak[half] = top;
      const float zero = top == -kInfinity ? 0.0f : top * peak_unit;
      float total = 0;
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[j * 4 + half * 2 + e];
          score = exp2_approx(fmaf(score, sums.unit, -zero));
          total += score;
        }
      }
      sums.sum[half] = sums.sum[half] * shrink[half] + total;
    }
  }

  static __device__ void pack_weights(const Scores& scores, Weights& weights) {
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        weights[step][i] = pack(scores[step * 8 + i * 2], scores[step * 8 + i * 2 + 1], T{});
      }
    }
  }

  static __device__ void shrink_sums(Out& out, const float (&shrink)[2]) {
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; ++j) {
      out[j * 4] *= shrink[0];
      out[j * 4 + 1] *= shrink[0];
      out[j * 4 + 2] *= shrink[1];
      out[j * 4 + 3] *= shrink[1];
    }
  }

  __device__ void wait_values(int i, const Turn<Traits>& turn) const {
    barrier_wait(shared.values_full + turn.stage(), turn.parity());
    const int key0 = tiles[i].index * kKeys;
    if (ragged && (key0 < place.begin || key0 + kKeys > place.end)) {
      clear_rows(shared.values + turn.stage() * Traits::kTileBytes, place.begin - key0, place.end - key0);
    }
  }

  __device__ void write(const Out& out, const Sums& sums) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float factor = normalize(sums, half);
      const int row = rows[half];
      const int lane = threadIdx.x % 4;
      T* to = static_cast<T*>(p.out) + (p.cu_q ? 0 : place.batch * p.out_strides.batch) + place.head * p.out_strides.head +
              static_cast<long long>(place.q_offset + row) * p.out_strides.row;
      // The four lanes of a row have 2 columns of each 8: each takes 8 adjacent ones.
#pragma unroll
      for (int block = 0; block < kHeadDim / 32; ++block) {
        unsigned words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int at = (block * 4 + j) * 4 + half * 2;
          words[j] = pack(out[at] * factor, out[at + 1] * factor, T{});
        }
        const uint4 mine = gather_quad(words);
        const int column = block * 32 + lane * 8;
        if (row < place.rows && column < p.v_head_dim) {
          *reinterpret_cast<uint4*>(to + column) = mine;
        }
      }
    }
  }

 private:
  __device__ void add_bias(Scores& scores, bool masked, const Turn<Traits>& turn) const {
    barrier_wait(shared.bias_full + turn.stage(), turn.parity());
    if (masked) {
      bias.add(scores, shared.bias + turn.stage() * Traits::kBiasBytes);
    } else {
      bias.add_nothing(scores);
    }
    barrier_arrive(shared.bias_empty + turn.stage());
  }

  // Rows of a tile of values that are not there may hold anything, and 0 * NaN is NaN.
  static __device__ void clear_rows(char* tile, int begin, int end) {
    sync_some(1, Traits::kConsumers);
    const int thread = static_cast<int>(threadIdx.x) - 128;
    for (int i = thread; i < kKeys * (kHeadDim / 8); i += Traits::kConsumers) {
      const int row = i / (kHeadDim / 8);
      if (row < begin || row >= end) {
        const int column = i % (kHeadDim / 8);
        *reinterpret_cast<uint4*>(tile + column / 8 * kKeys * 128 + row * 128 + column % 8 * 16) = make_uint4(0, 0, 0, 0);
      }
    }
    shared_writes_fence();
    sync_some(1, Traits::kConsumers);
  }

  // What the sums of a row are multiplied by. Writes the logarithm of its softmax's sum where it is wanted.
  __device__ float normalize(const Sums& sums, int half) const {
    float total = sums.sum[half];
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    float top = sums.peak[half] == -kInfinity || kGeneral ? sums.peak[half] : sums.peak[half] * sums.unit;
    float factor = 1.0f;
    if (p.sinks) {
      const float sink = kLog2e * to_float(static_cast<const T*>(p.sinks)[place.head]);
      const float higher = fmaxf(top, sink);
      factor = top == -kInfinity ? 0.0f : exp2f(top - higher);
      total = total * factor + exp2f(sink - higher);
      top = higher;
    }
    if (p.lse && rows[half] < place.rows && threadIdx.x % 4 == 0) {
      const long long sequence = p.cu_q ? place.q_offset : place.batch * p.lse_strides[0];
      p.lse[sequence + place.head * p.lse_strides[1] + rows[half]] = top == -kInfinity ? top : (top + log2f(total)) * kLn2;
    }
    return total > 0 ? factor / total : total == 0 ? 0.0f : total;  // NaN stays
  }

  const FlashParams& p;
  const Place& place;
  const Tiles& tiles;
  const Shared<Traits>& shared;
  const char* queries;
  int rows[2];
  int lows[2];  // keys that they see
  int highs[2];
  int whole_from;  // keys that all rows of the warpgroup see
  int whole_to;
  bool ragged;
  TileBias<T, kKeys, Traits::kRows> bias;
};

template <typename Traits>
__device__ inline void consume(
    const FlashParams& p,
    const Place& place,
    const Tiles& tiles,
    const Shared<Traits>& shared,
    const Order<Traits::kGroups>& order,
    Turn<Traits>& turn) {
  using Part = Consumer<Traits>;
  const Part part(p, place, tiles, shared, order.group);
  typename Part::Out out;
  typename Part::Sums sums;
  part.clear(out, sums);
  if (tiles.first < tiles.last) {
    typename Part::Weights weights;
    float shrink[2];
    barrier_wait(shared.queries_full, turn.block % 2);
    {
      typename Part::Scores scores;
      barrier_wait(shared.keys_full + turn.stage(), turn.parity());
      part.score(scores, turn.stage());
      wgmma_wait<0>();
      barrier_arrive(shared.keys_empty + turn.stage());
      part.soften(scores, tiles.first, turn, sums, shrink);
      part.pack_weights(scores, weights);
    }
    for (int i = tiles.first + 1; i < tiles.last; ++i) {
      const Turn<Traits> last = turn;
      ++turn.tile;
      typename Part::Scores scores;
      barrier_wait(shared.keys_full + turn.stage(), turn.parity());
      part.wait_values(i - 1, last);
      order.take();
      part.score(scores, turn.stage());
      part.add_values(out, weights, last.stage());
      order.pass();
      wgmma_wait<1>();
      barrier_arrive(shared.keys_empty + turn.stage());
      part.soften(scores, i, turn, sums, shrink);
      wgmma_wait<0>();
      barrier_arrive(shared.values_empty + last.stage());
      part.shrink_sums(out, shrink);
      part.pack_weights(scores, weights);
    }
    barrier_arrive(shared.queries_empty);
    part.wait_values(tiles.last - 1, turn);
    part.add_values(out, weights, turn.stage());
    wgmma_wait<0>();
    barrier_arrive(shared.values_empty + turn.stage());
    ++turn.tile;
    ++turn.block;
  }
  part.write(out, sums);
}

// Visits the pieces of this block: with a block for each piece that is one, otherwise the copies of the next begin while one is
// written.
template <typename Traits, typename Visit>
__device__ inline void for_each_piece(const FlashParams& p, Visit&& visit) {
  const int pieces = p.heads * p.batch * row_tiles_of(p, Traits::kRows);
  for (int piece = static_cast<int>(blockIdx.x); piece < pieces; piece += static_cast<int>(gridDim.x)) {
    const Place place(p, piece, Traits::kRows, Traits::kKeys);
    if (!place.empty()) {
      visit(place, Tiles(p, place, Traits::kGeneral || Traits::kBiased));
    }
  }
}

template <typename Traits>
__device__ inline void flash(const FlashParams& p, const Maps& maps) {
  extern __shared__ char memory[];
  const Shared<Traits> shared(memory);
  if (threadIdx.x == 0) {
    shared.init_barriers();
  }
  __syncthreads();
  const int group = static_cast<int>(threadIdx.x) / 128 - 1;
  Turn<Traits> turn;
  if (group < 0) {
    give_registers<Traits::kProducerRegisters>();
    if (threadIdx.x == 0) {
      for_each_piece<Traits>(
          p, [&](const Place& place, const Tiles& tiles) { produce<Traits>(p, place, tiles, shared, maps, turn); });
    }
  } else {
    take_registers<Traits::kConsumerRegisters>();
    const Order<Traits::kGroups> order(group);
    for_each_piece<Traits>(
        p, [&](const Place& place, const Tiles& tiles) { consume<Traits>(p, place, tiles, shared, order, turn); });
  }
}

}  // namespace mlx_cuda

#define MLX_CUDA_FLASH_MAP const __grid_constant__ mlx_cuda::TensorMap
#define MLX_CUDA_FLASH_KERNEL(name, T, KIND, ...)                                                                \
  using name##_traits = mlx_cuda::Traits<T, mlx_cuda::FlashSm90Shape{__VA_ARGS__}, mlx_cuda::FlashKind::KIND>;   \
  extern "C" __global__ void __launch_bounds__(name##_traits::kThreads, 1) name(                                 \
      const __grid_constant__ mlx_cuda::FlashParams params, MLX_CUDA_FLASH_MAP queries, MLX_CUDA_FLASH_MAP keys, \
      MLX_CUDA_FLASH_MAP values MLX_CUDA_FLASH_PARAMETERS_##KIND) {                                              \
    mlx_cuda::flash<name##_traits>(params, {&queries, &keys, &values, MLX_CUDA_FLASH_BIAS_##KIND});              \
  }
#define MLX_CUDA_FLASH_PARAMETERS_plain
#define MLX_CUDA_FLASH_PARAMETERS_capped
#define MLX_CUDA_FLASH_PARAMETERS_general
#define MLX_CUDA_FLASH_PARAMETERS_biased , MLX_CUDA_FLASH_MAP bias
#define MLX_CUDA_FLASH_BIAS_plain nullptr
#define MLX_CUDA_FLASH_BIAS_capped nullptr
#define MLX_CUDA_FLASH_BIAS_general nullptr
#define MLX_CUDA_FLASH_BIAS_biased &bias

#define MLX_CUDA_FLASH_KIND(dim, KIND, ...)                                      \
  MLX_CUDA_FLASH_KERNEL(flash_float16_##dim##_##KIND, __half, KIND, __VA_ARGS__) \
  MLX_CUDA_FLASH_KERNEL(flash_bfloat16_##dim##_##KIND, __nv_bfloat16, KIND, __VA_ARGS__)
#define MLX_CUDA_FLASH_UNBIASED(dim, ...)       \
  MLX_CUDA_FLASH_KIND(dim, plain, __VA_ARGS__)  \
  MLX_CUDA_FLASH_KIND(dim, capped, __VA_ARGS__) \
  MLX_CUDA_FLASH_KIND(dim, general, __VA_ARGS__)
#define MLX_CUDA_FLASH_BIASED(dim, ...)     \
  MLX_CUDA_FLASH_UNBIASED(dim, __VA_ARGS__) \
  MLX_CUDA_FLASH_KIND(dim, biased, __VA_ARGS__)

#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // what it is made of exists there only
MLX_CUDA_FLASH_SM90(MLX_CUDA_FLASH_BIASED, MLX_CUDA_FLASH_UNBIASED)
#endif
