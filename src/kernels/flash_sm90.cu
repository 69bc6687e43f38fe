// Attention of many queries on Hopper: FlashAttention (arXiv:2205.14135, arXiv:2407.08608) with wgmma and the bulk tensor copy
// engine.
//
// A block takes 64 rows of queries for each of its consumer warpgroups, which share the tiles of keys and values that one producer
// warp copies into a ring of two stages. While the scores of the next tile are computed, the tensor cores add the last tile's
// weighted values. Tiles that a window, lengths or a mask hide from all rows are never copied; only tiles that they cut pay for it.
#include "kernels/flash.h"

#include "kernels/mma.cuh"
#include "kernels/pipeline.cuh"
#include "kernels/vector.cuh"
#include "kernels/wgmma.cuh"

namespace mlx_cuda {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kLargest = __builtin_bit_cast(float, 0x7f7fffff);
constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);
constexpr int kStages = 2;

// The part of the problem that one block has: its rows and the keys that they may see, as rows within one sequence.
struct Place {
  int batch;
  int head;
  int row0;      // of the block's first query
  int rows;      // queries of the sequence
  int q_offset;  // of the sequence's rows in q and out
  int k_offset;
  int begin;  // keys that are there
  int end;
  int first;  // tiles of keys that some row sees, without regard to a mask
  int last;

  __device__ Place(const FlashParams& p, int row0, int head, int batch, int block_rows, int tile_keys)
      : batch(batch), head(head), row0(row0) {
    q_offset = p.cu_q ? p.cu_q[batch] : 0;
    k_offset = p.cu_k ? p.cu_k[batch] : 0;
    rows = p.cu_q ? p.cu_q[batch + 1] - q_offset : p.q_length;
    const int keys = p.cu_k ? p.cu_k[batch + 1] - k_offset : p.kv_length;
    begin = p.starts ? max(p.starts[batch], 0) : 0;
    end = p.ends ? min(p.ends[batch], keys) : keys;
    const int from = lowest(p, row0);
    const int to = highest(p, min(row0 + block_rows, rows) - 1);
    first = from / tile_keys;
    last = to > from ? (to + tile_keys - 1) / tile_keys : first;
  }

  // The keys [lowest, highest) that a row may see.
  __device__ int lowest(const FlashParams& p, int row) const {
    return p.window_left >= 0 ? max(begin, row + end - rows - p.window_left) : begin;
  }
  __device__ int highest(const FlashParams& p, int row) const {
    return p.window_right >= 0 ? min(end, row + end - rows + p.window_right + 1) : end;
  }
};

// The tiles of keys that a block visits, in order.
struct Tiles {
  const int* list = nullptr;
  int at;
  int stop;

  __device__ Tiles(const FlashParams& p, const Place& place, int tile_of_rows, bool masked) : at(place.first), stop(place.last) {
    if (masked && p.mask.tiles) {
      const long long* strides = p.mask.tile_strides;
      const long long* counts = p.mask.count_strides;
      list = p.mask.tiles + place.batch * strides[0] + place.head * strides[1] + tile_of_rows * strides[2];
      const int count = p.mask.tile_counts[place.batch * counts[0] + place.head * counts[1] + tile_of_rows * counts[2]];
      int low = 0;
      while (low < count && list[low] / 2 < place.first) {
        ++low;
      }
      int high = low;
      while (high < count && list[high] / 2 < place.last) {
        ++high;
      }
      at = low;
      stop = high;
    }
  }
  __device__ int count() const {
    return max(stop - at, 0);
  }
  __device__ int tile(int i) const {
    return list ? list[at + i] / 2 : at + i;
  }
  __device__ bool masked(int i) const {
    return list && (list[at + i] & 1) == 0;
  }
};

template <int D, int KN, int Groups>
struct Shared {
  static constexpr int kChunk = 64;  // columns that lie in 128 adjacent bytes
  static constexpr int kQueryBytes = Groups * 64 * D * 2;
  static constexpr int kTileBytes = KN * D * 2;
  static constexpr int kBytes = kQueryBytes + 2 * kStages * kTileBytes + 1024 + 128;

  char* queries;
  char* keys;
  char* values;
  Barrier* queries_full;
  Barrier* keys_full;
  Barrier* keys_empty;
  Barrier* values_full;
  Barrier* values_empty;

  __device__ explicit Shared(char* memory) {
    char* base = memory + (1024 - shared_address(memory) % 1024) % 1024;
    queries = base;
    keys = queries + kQueryBytes;
    values = keys + kStages * kTileBytes;
    queries_full = reinterpret_cast<Barrier*>(values + kStages * kTileBytes);
    keys_full = queries_full + 1;
    keys_empty = keys_full + kStages;
    values_full = keys_empty + kStages;
    values_empty = values_full + kStages;
  }
};

// softcap * log2(e) * tanh(scale / softcap * score), as score * ratio(score^2) where |scale / softcap * score| <= 1: there a fit of
// tanh(x) / x with Chebyshev polynomials has a relative error of 7e-6.
struct Softcap {
  float inner;  // scale / softcap
  float cap;    // softcap * log2(e)
  float factors[5];

  __device__ explicit Softcap(const FlashParams& p) : inner(p.scale / p.softcap), cap(p.softcap * kLog2e) {
    constexpr float kFit[] = {0.99999344f, -0.33299112f, 0.13041894f, -0.04489737f, 0.0090758186f};
    float power = inner * cap;
    for (int i = 0; i < 5; ++i) {
      factors[i] = kFit[i] * power;
      power *= inner * inner;
    }
  }

  template <int N>
  __device__ void apply(float (&scores)[N]) const {
    float top = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      top = fmaxf(top, fabsf(scores[i]));
    }
    if (__any_sync(~0u, !(top * inner <= 1.0f))) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        scores[i] = fmaf(-2.0f * cap, reciprocal_approx(exp2_approx(2.0f * kLog2e * inner * scores[i]) + 1.0f), cap);
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float square = scores[i] * scores[i];
      float ratio = fmaf(factors[4], square, factors[3]);
      ratio = fmaf(ratio, square, factors[2]);
      ratio = fmaf(ratio, square, factors[1]);
      scores[i] *= fmaf(ratio, square, factors[0]);
    }
  }
};

// The words that the four lanes of a quad want of each other: lane c gives its word number o to lane o, and has the words of lanes
// 0, 1, 2, 3 afterwards.
__device__ inline void exchange(unsigned (&words)[4]) {
  const int lane = threadIdx.x % 4;
  unsigned got[4];
#pragma unroll
  for (int turn = 0; turn < 4; ++turn) {
    const int other = lane ^ turn;
    const unsigned given = other == 0 ? words[0] : other == 1 ? words[1] : other == 2 ? words[2] : words[3];
    const unsigned word = __shfl_xor_sync(~0u, given, turn);
    got[0] = other == 0 ? word : got[0];
    got[1] = other == 1 ? word : got[1];
    got[2] = other == 2 ? word : got[2];
    got[3] = other == 3 ? word : got[3];
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    words[i] = got[i];
  }
}

// Adds an additive mask to the scores of one row, which come out in units of log2(e).
template <typename T, int KN>
__device__ inline void add_bias(const FlashParams& p, const T* row, float (&scores)[KN / 2], int half, int key0, float factor) {
  const int lane = threadIdx.x % 4;
  auto add = [&](float& score, float bias) {
    // A finite number stays finite, however low.
    score = bias == -kInfinity ? bias : fmaxf(fmaf(kLog2e, bias, score * factor), -kLargest);
  };
  const T* from = row + key0 * p.mask.strides[3];
  const bool aligned = p.mask.strides[3] == 1 && key0 + KN <= p.kv_length && reinterpret_cast<unsigned long long>(from) % 16 == 0;
  if (__all_sync(~0u, aligned)) {
#pragma unroll
    for (int block = 0; block < KN / 32; ++block) {
      const uint4 loaded = load16<true>(from + block * 32 + lane * 8);
      unsigned words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
      exchange(words);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 bias = unpack(words[j], T{});
        add(scores[(block * 4 + j) * 4 + half * 2], bias.x);
        add(scores[(block * 4 + j) * 4 + half * 2 + 1], bias.y);
      }
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < KN / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int key = key0 + 8 * j + 2 * lane + e;
      add(scores[j * 4 + half * 2 + e], key < p.kv_length ? to_float(row[key * p.mask.strides[3]]) : -kInfinity);
    }
  }
}

// One tile's scores on their way to weights: what the options say is done, hidden ones are -inf. Returns the unit of the result in
// log2(e). `rows`: the two rows of this thread; bounds: the keys that they see.
template <typename T, int KN, bool General>
__device__ inline float restrict_scores(
    const FlashParams& p,
    const Place& place,
    float (&scores)[KN / 2],
    int key0,
    const int (&rows)[2],
    const int (&lows)[2],
    const int (&highs)[2],
    bool whole,
    bool masked) {
  const int column = 2 * (threadIdx.x % 4);
  float unit = p.scale * kLog2e;
  if constexpr (General) {
    if (p.softcap > 0) {
      Softcap(p).apply(scores);
      unit = 1.0f;
    }
    if (masked && p.mask.bits) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = min(rows[half], place.rows - 1);
        const unsigned* words = p.mask.bits + place.batch * p.mask.bit_strides[0] + place.head * p.mask.bit_strides[1] +
                                row * p.mask.bit_strides[2] + key0 / 32;
#pragma unroll
        for (int w = 0; w < KN / 32; ++w) {
          const unsigned bits = words[w] >> column;
#pragma unroll
          for (int j = 0; j < 4; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              float& score = scores[(w * 4 + j) * 4 + half * 2 + e];
              score = bits >> (8 * j + e) & 1 ? score : -kInfinity;
            }
          }
        }
      }
    } else if (masked) {
      const float factor = unit;
      unit = 1.0f;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = min(rows[half], place.rows - 1);
        const T* from = static_cast<const T*>(p.mask.values) + place.batch * p.mask.strides[0] + place.head * p.mask.strides[1] +
                        row * p.mask.strides[2];
        add_bias<T, KN>(p, from, scores, half, key0, factor);
      }
    }
  }
  if (!whole) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < KN / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int key = key0 + 8 * j + column + e;
          float& score = scores[j * 4 + half * 2 + e];
          score = key >= lows[half] && key < highs[half] ? score : -kInfinity;
        }
      }
    }
  }
  return unit;
}

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

template <typename T, int D, int KN, int Groups>
__device__ inline void produce(
    const FlashParams& p,
    const Place& place,
    const Tiles& tiles,
    const Shared<D, KN, Groups>& shared,
    const TensorMap* q_map,
    const TensorMap* k_map,
    const TensorMap* v_map) {
  using Memory = Shared<D, KN, Groups>;
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
  copy(shared.queries, q_map, shared.queries_full, place.q_offset + place.row0, place.head, q_batch, Groups * 64);
  for (int i = 0; i < count; ++i) {
    const int stage = i % kStages;
    const int parity = i / kStages % 2;
    const int row = place.k_offset + tiles.tile(i) * KN;
    barrier_wait(shared.keys_empty + stage, parity ^ 1);
    copy(shared.keys + stage * Memory::kTileBytes, k_map, shared.keys_full + stage, row, kv_head, kv_batch, KN);
    barrier_wait(shared.values_empty + stage, parity ^ 1);
    copy(shared.values + stage * Memory::kTileBytes, v_map, shared.values_full + stage, row, kv_head, kv_batch, KN);
  }
}

// Warpgroups put their products on the tensor cores in turns, so that one computes its weights while another multiplies.
template <int Groups>
struct Turns {
  static constexpr int kFirst = 2;  // number of the first group's barrier
  int group;

  __device__ explicit Turns(int group) : group(group) {
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

template <typename T, int D, int KN, int Groups, bool General>
__device__ inline void consume(
    const FlashParams& p, const Place& place, const Tiles& tiles, const Shared<D, KN, Groups>& shared, int group) {
  using Memory = Shared<D, KN, Groups>;
  const int lane = threadIdx.x % 32;
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
  // Scores become weights in place; returns by how much what has been summed so far shrinks.
  auto soften = [&](float (&scores)[KN / 2], int i, float (&shrink)[2]) {
    const int key0 = tiles.tile(i) * KN;
    const bool whole = key0 >= whole_from && key0 + KN <= whole_to;
    unit = restrict_scores<T, KN, General>(p, place, scores, key0, rows, lows, highs, whole, General && tiles.masked(i));
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
  auto values_ready = [&](int i) {
    const int stage = i % kStages;
    barrier_wait(shared.values_full + stage, i / kStages % 2);
    const int key0 = tiles.tile(i) * KN;
    if (ragged && (key0 < place.begin || key0 + KN > place.end)) {
      clear_rows<D, KN, Groups>(shared.values + stage * Memory::kTileBytes, place.begin - key0, place.end - key0);
    }
    return stage;
  };

  const int count = tiles.count();
  const Turns<Groups> turns(group);
  if (count > 0) {
    barrier_wait(shared.queries_full, 0);
    float shrink[2];
    {
      float scores[KN / 2];
      barrier_wait(shared.keys_full, 0);
      score(scores, 0);
      wgmma_wait<0>();
      barrier_arrive(shared.keys_empty);
      soften(scores, 0, shrink);
      keep(scores);
    }
    for (int i = 1; i < count; ++i) {
      float scores[KN / 2];
      const int stage = i % kStages;
      barrier_wait(shared.keys_full + stage, i / kStages % 2);
      const int last_stage = values_ready(i - 1);
      turns.take();
      score(scores, stage);
      add_values(last_stage);
      turns.pass();
      wgmma_wait<1>();
      barrier_arrive(shared.keys_empty + stage);
      soften(scores, i, shrink);
      wgmma_wait<0>();
      barrier_arrive(shared.values_empty + last_stage);
#pragma unroll
      for (int j = 0; j < D / 8; ++j) {
        out[j * 4] *= shrink[0];
        out[j * 4 + 1] *= shrink[0];
        out[j * 4 + 2] *= shrink[1];
        out[j * 4 + 3] *= shrink[1];
      }
      keep(scores);
    }
    add_values(values_ready(count - 1));
    wgmma_wait<0>();
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

template <typename T, int D, int KN, int Groups, bool General>
__device__ inline void flash(const FlashParams& p, const TensorMap* q_map, const TensorMap* k_map, const TensorMap* v_map) {
  extern __shared__ char memory[];
  const Shared<D, KN, Groups> shared(memory);
  if (threadIdx.x == 0) {
    barrier_init(shared.queries_full, 1);
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(shared.keys_full + stage, 1);
      barrier_init(shared.values_full + stage, 1);
      barrier_init(shared.keys_empty + stage, Groups * 128);
      barrier_init(shared.values_empty + stage, Groups * 128);
    }
    barrier_init_fence();
  }
  __syncthreads();
  // Blocks that run at the same time share as many keys as fit into the L2 cache (`section` heads of all batch entries); among
  // those, the last rows begin, which see most under a causal mask.
  const int row_tiles = (p.q_length + Groups * 64 - 1) / (Groups * 64);
  const int heads = p.heads * p.batch;
  const int first_head = static_cast<int>(blockIdx.x) / (row_tiles * p.section) * p.section;
  const int section = min(p.section, heads - first_head);
  const int within = static_cast<int>(blockIdx.x) - first_head * row_tiles;
  const int tile_of_rows = row_tiles - 1 - within / section;
  const int head = first_head + within % section;
  const Place place(p, tile_of_rows * Groups * 64, head % p.heads, head / p.heads, Groups * 64, KN);
  if (place.row0 >= place.rows) {
    return;
  }
  const Tiles tiles(p, place, tile_of_rows, General);
  const int group = static_cast<int>(threadIdx.x) / 128 - 1;
  constexpr int kConsumerRegisters = Groups == 2 ? 240 : 160;
  constexpr int kProducerRegisters = Groups == 2 ? 24 : 32;
  if (group < 0) {
    give_registers<kProducerRegisters>();
    if (threadIdx.x == 0) {
      produce<T, D, KN, Groups>(p, place, tiles, shared, q_map, k_map, v_map);
    }
  } else {
    take_registers<kConsumerRegisters>();
    consume<T, D, KN, Groups, General>(p, place, tiles, shared, group);
  }
}

}  // namespace mlx_cuda

#define MLX_CUDA_FLASH_KERNEL(name, T, D, KN, GROUPS, GENERAL)                                                   \
  extern "C" __global__ void __launch_bounds__(128 * (GROUPS + 1), 1) name(                                      \
      const __grid_constant__ mlx_cuda::FlashParams params, const __grid_constant__ mlx_cuda::TensorMap queries, \
      const __grid_constant__ mlx_cuda::TensorMap keys, const __grid_constant__ mlx_cuda::TensorMap values) {    \
    mlx_cuda::flash<T, D, KN, GROUPS, GENERAL>(params, &queries, &keys, &values);                                \
  }

// `general`: with a mask or a softcap. The same numbers as in primitives/flash_sm90.cpp.
#define MLX_CUDA_FLASH(dtype, T, D, KN, GROUPS, GENERAL_GROUPS)       \
  MLX_CUDA_FLASH_KERNEL(flash_##dtype##_##D, T, D, KN, GROUPS, false) \
  MLX_CUDA_FLASH_KERNEL(flash_##dtype##_##D##_general, T, D, KN, GENERAL_GROUPS, true)

#define MLX_CUDA_FLASH_ALL(dtype, T)       \
  MLX_CUDA_FLASH(dtype, T, 64, 128, 3, 2)  \
  MLX_CUDA_FLASH(dtype, T, 128, 128, 2, 2) \
  MLX_CUDA_FLASH(dtype, T, 192, 96, 2, 2)  \
  MLX_CUDA_FLASH(dtype, T, 256, 64, 2, 2)

#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // what it is made of exists there only
MLX_CUDA_FLASH_ALL(bfloat16, __nv_bfloat16)
MLX_CUDA_FLASH_ALL(float16, __half)
#endif
