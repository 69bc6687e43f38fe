// Attention of few queries on Hopper, for more rows than one tile of mma.sync holds: the ring of decode.cu with the bulk tensor
// copy engine and wgmma.
//
// The queries of all heads that share a kv head are the 64 rows of a warpgroup's products, whose operands the tensor cores read
// from shared memory themselves: with mma.sync each warp of 16 rows would load all keys and values into its registers again. One
// producer warp copies tiles of keys and values, across the units that the block has, as far ahead as the ring holds.
#include "attention/decode/results.cuh"
#include "device/pipeline.cuh"
#include "device/wgmma.cuh"

namespace mlx_cuda {

[[maybe_unused]] constexpr int kGroups = 2;  // warpgroups that compute
[[maybe_unused]] constexpr int kConsumers = kGroups * 128;
[[maybe_unused]] constexpr int kChunk = 64;  // columns that lie in 128 adjacent bytes

// The groups have 64 rows each and share the tiles, or share the rows and take tiles in turn, as `row_groups` says.
template <int D, int KN, int Stages>
struct Shared {
  // A barrier knows the last phase from the one before by its parity alone. So a group that waits for a stage must have been there
  // the time before: where the groups take tiles in turn, each has to meet the same stages again.
  static_assert(Stages % kGroups == 0);

  static constexpr int kQueryBytes = 64 * D * 2;  // of 64 rows
  static constexpr int kTileBytes = KN * D * 2;
  static constexpr int kPitch = D + 4;  // of a row of results

  char* ring;  // [stage][keys, values]
  char* queries;
  float* results;  // [row][pitch], and
  float* scales;   // [row][2]: the second slice's
  Barrier* full;
  Barrier* empty;

  __device__ Shared(char* memory, int row_groups) : ring(memory), queries(ring + 2 * Stages * kTileBytes) {
    full = reinterpret_cast<Barrier*>(queries + row_groups * kQueryBytes);
    empty = full + Stages;
    results = reinterpret_cast<float*>(empty + Stages);
    scales = results + 64 * kPitch;
  }
  __device__ char* keys(int stage) const {
    return ring + 2 * stage * kTileBytes;
  }
  __device__ char* values(int stage) const {
    return keys(stage) + kTileBytes;
  }
};

// A box of a tensor, which leaves the L2 cache first: keys and values are read once.
__device__ inline void copy_box_once(
    void* shared, const TensorMap* map, Barrier* barrier, unsigned long long once, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], "
      "[%2], "
      "%7;" ::"r"(shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(once)
      : "memory");
}

template <int D, int KN, int Stages>
__device__ inline void produce(
    const DecodeParams& p, const Shared<D, KN, Stages>& shared, const TensorMap* k_map, const TensorMap* v_map) {
  using Memory = Shared<D, KN, Stages>;
  unsigned long long once;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
  Segments segments(p);
  Segment s;
  int turn = 0;
  while (segments.next(s)) {
    for (int i = 0; i < s.tiles; ++i, ++turn) {
      if (threadIdx.x % 32 == 0) {
        const int stage = turn % Stages;
        barrier_wait(shared.empty + stage, turn / Stages % 2 ^ 1);
        barrier_expect(shared.full + stage, 2 * Memory::kTileBytes);
        const int key = s.first + i * KN;
#pragma unroll
        for (int chunk = 0; chunk < D / kChunk; ++chunk) {
          copy_box_once(
              shared.keys(stage) + chunk * KN * 128, k_map, shared.full + stage, once, chunk * kChunk, key, s.kv_head, s.batch);
        }
#pragma unroll
        for (int chunk = 0; chunk < D / kChunk; ++chunk) {
          copy_box_once(
              shared.values(stage) + chunk * KN * 128, v_map, shared.full + stage, once, chunk * kChunk, key, s.kv_head, s.batch);
        }
      }
    }
  }
}

// The queries of a unit, as the copy engine would swizzle them.
template <typename T, int D>
__device__ inline void load_queries(const DecodeParams& p, const Segment& s, char* to) {
#pragma unroll 4
  for (int index = threadIdx.x; index < p.row_warps * 64 * (D / 8); index += kConsumers) {
    const int row = index / (D / 8);
    const int piece = index % (D / 8);
    uint4 value = make_uint4(0, 0, 0, 0);
    if (row < s.rows && piece * 8 < p.head_dim) {
      const Row place = row_of(p, s, row);
      value = *reinterpret_cast<const uint4*>(
          static_cast<const T*>(p.q) + s.batch * p.q_strides.batch + place.head * p.q_strides.head + place.query * p.q_strides.row +
          piece * 8);
    }
    const int chunk = row / 64 * (D / kChunk) + piece / 8;
    *reinterpret_cast<uint4*>(to + (chunk * 64 + row % 64) * 128 + (piece % 8 ^ row % 8) * 16) = value;
  }
  shared_writes_fence();
}

// Values that are not there may be anything, and 0 * NaN is NaN. By the `threads` threads that have the tile.
template <int D, int KN>
__device__ inline void clear_rows(char* values, int begin, int end, int barrier, int threads) {
  sync_some(barrier, threads);
  for (int index = static_cast<int>(threadIdx.x) % threads; index < KN * (D / 8); index += threads) {
    const int row = index / (D / 8);
    const int piece = index % (D / 8);
    if (row < begin || row >= end) {
      *reinterpret_cast<uint4*>(values + (piece / 8 * KN + row) * 128 + piece % 8 * 16) = make_uint4(0, 0, 0, 0);
    }
  }
  shared_writes_fence();
  sync_some(barrier, threads);
}

// What a thread has of two rows that are 8 apart: columns 2c and 2c + 1 of every 8, not yet divided by `sum`.
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
      const float top = fmaxf(peak[half], scale.x);
      const float theirs = scale.x == -kInfinity ? 0.0f : exp2_approx(scale.x - top);
      shrink(half, peak[half] == -kInfinity ? 0.0f : exp2_approx(peak[half] - top));
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
              p, s, mine, column, peak[half], sum[half],
              odd ? make_float4(got.x, got.y, second.x, second.y) : make_float4(first.x, first.y, got.x, got.y));
        }
      }
    }
  }
};

// One tile's scores become weights, and what has been summed so far shrinks to their unit.
template <typename T, int D, int KN>
__device__ inline void soften(
    const DecodeParams& p,
    const Segment& s,
    float (&scores)[KN / 2],
    int row,
    int key0,
    Rows<D>& rows,
    unsigned (&weights)[KN / 16][4]) {
  const bool whole = whole_tile(p, s, key0);
  if (!whole) {
    restrict_scores<T, KN / 8>(p, s, reinterpret_cast<float (*)[4]>(scores), row, key0 + 2 * static_cast<int>(threadIdx.x % 4));
  }
  const float unit = whole ? p.scale : 1.0f;
  float base[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float top = -kInfinity;
#pragma unroll
    for (int j = 0; j < KN / 8; ++j) {
      top = fmaxf(top, fmaxf(scores[j * 4 + half * 2], scores[j * 4 + half * 2 + 1]));
    }
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    base[half] = fmaxf(top * unit, rows.peak[half]);
  }
  if (__any_sync(~0u, base[0] > rows.peak[0] || base[1] > rows.peak[1])) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows.shrink(half, rows.peak[half] == -kInfinity ? 0.0f : exp2_approx(rows.peak[half] - base[half]));
      rows.peak[half] = base[half];
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float zero = base[half] == -kInfinity ? 0.0f : base[half];
    float total = 0;
#pragma unroll
    for (int j = 0; j < KN / 8; ++j) {
      const float low = exp2_approx(fmaf(scores[j * 4 + half * 2], unit, -zero));
      const float high = exp2_approx(fmaf(scores[j * 4 + half * 2 + 1], unit, -zero));
      total += low + high;
      weights[j / 2][j % 2 * 2 + half] = pack(low, high, T{});
    }
    rows.sum[half] += total;
  }
}

template <typename T, int D, int KN, int Stages>
__device__ inline void consume(const DecodeParams& p, const Shared<D, KN, Stages>& shared) {
  using Memory = Shared<D, KN, Stages>;
  const int group = static_cast<int>(threadIdx.x) / 128;
  const int slices = kGroups / p.row_warps;
  const int slice = slices == 1 ? 0 : group;
  const int row_group = slices == 1 ? group : 0;
  const int row = row_group * 64 + static_cast<int>(threadIdx.x) % 128 / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4;
  const char* queries = shared.queries + row_group * Memory::kQueryBytes;

  Segments segments(p);
  Segment s;
  int first_turn = 0;  // how many tiles have been in the ring before
  for (; segments.next(s); first_turn += s.tiles) {
    sync_some(1, kConsumers);  // nobody reads the last unit's queries and results any more
    load_queries<T, D>(p, s, shared.queries);
    sync_some(1, kConsumers);

    Rows<D> rows;
    int last_stage = 0;
#pragma unroll 1
    for (int i = slice; i < s.tiles; i += slices) {
      const int turn = first_turn + i;
      const int stage = turn % Stages;
      const int key0 = s.first + i * KN;
      barrier_wait(shared.full + stage, turn / Stages % 2);
      float scores[KN / 2];
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < D / 16; ++step) {
        const auto a = descriptor(queries + step / 4 * 64 * 128 + step % 4 * 32);
        const auto b = descriptor(shared.keys(stage) + step / 4 * KN * 128 + step % 4 * 32);
        wgmma_shared(scores, a, b, step > 0, T{});
      }
      wgmma_commit();
      if (i >= slices) {  // meanwhile the last tile's values have been added
        wgmma_wait<1>();
        barrier_arrive(shared.empty + last_stage);
      }
      last_stage = stage;
      wgmma_wait<0>();
      unsigned weights[KN / 16][4];
      soften<T, D, KN>(p, s, scores, row, key0, rows, weights);
      if (key0 < s.span.begin || key0 + KN > s.span.end) {
        clear_rows<D, KN>(shared.values(stage), s.span.begin - key0, s.span.end - key0, 2 + slice, p.row_warps * 128);
      }
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < KN / 16; ++step) {
        wgmma_registers(rows.out, weights[step], descriptor(shared.values(stage) + step * 2048, KN * 128), T{});
      }
      wgmma_commit();
    }
    wgmma_wait<0>();
    if (slice < s.tiles) {
      barrier_arrive(shared.empty + last_stage);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows.sum[half] += __shfl_xor_sync(~0u, rows.sum[half], 1);
      rows.sum[half] += __shfl_xor_sync(~0u, rows.sum[half], 2);
    }
    if (slices > 1) {
      if (slice == 1) {
        rows.leave(shared.results, shared.scales, row, Memory::kPitch);
      }
      sync_some(1, kConsumers);
      if (slice == 1) {
        continue;
      }
      rows.add(shared.results, shared.scales, row, Memory::kPitch);
    }
    rows.template write<T>(p, s, row);
  }
}

template <typename T, int D, int KN, int Stages>
__device__ inline void decode(const DecodeParams& p, const TensorMap* k_map, const TensorMap* v_map) {
  extern __shared__ __align__(1024) char memory[];
  const Shared<D, KN, Stages> shared(memory, p.row_warps);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Stages; ++stage) {
      barrier_init(shared.full + stage, 1);
      barrier_init(shared.empty + stage, p.row_warps * 128);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x >= kConsumers) {
    give_registers<40>();
    if (threadIdx.x < kConsumers + 32) {
      produce<D, KN, Stages>(p, shared, k_map, v_map);
    }
  } else {
    take_registers<232>();
    consume<T, D, KN, Stages>(p, shared);
  }
}

}  // namespace mlx_cuda

#define MLX_CUDA_DECODE_KERNEL(name, T, D, KN, STAGES)                                                         \
  extern "C" __global__ void __launch_bounds__(mlx_cuda::kConsumers + 128, 1) name(                            \
      const __grid_constant__ mlx_cuda::DecodeParams params, const __grid_constant__ mlx_cuda::TensorMap keys, \
      const __grid_constant__ mlx_cuda::TensorMap values) {                                                    \
    mlx_cuda::decode<T, D, KN, STAGES>(params, &keys, &values);                                                \
  }

// The same numbers as in attention/decode/plans.cpp.
#define MLX_CUDA_DECODE_ALL(dtype, T)                            \
  MLX_CUDA_DECODE_KERNEL(decode_##dtype##_64_rows, T, 64, 64, 8) \
  MLX_CUDA_DECODE_KERNEL(decode_##dtype##_128_rows, T, 128, 64, 4)

#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // what it is made of exists there only
MLX_CUDA_DECODE_ALL(bfloat16, __nv_bfloat16)
MLX_CUDA_DECODE_ALL(float16, __half)
#endif
