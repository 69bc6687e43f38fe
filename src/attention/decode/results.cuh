// Writes results of the decode kernels and merges the parts of a unit: always in the order of the parts, so that results do not
// depend on timing.
#pragma once

#include "attention/decode/rows.cuh"
#include "device/ptx.cuh"

namespace mlx_cuda {

// Four columns of a row: numerators, with the maximum of the scores (with quantized caches it may be a little less) and the sum of
// the weights that they go with.
struct Result {
  float peak = -kInfinity;  // in units of log2(e)
  float sum = 0;
  float4 value = make_float4(0, 0, 0, 0);

  // Adds that of other keys, whose maximum and sum are `scale`.
  __device__ void add(const float2& scale, const float4& other) {
    const float higher = nan_max(peak, scale.x);
    const float mine = shrinking_approx(peak, higher);
    const float theirs = shrinking_approx(scale.x, higher);
    sum = mine * sum + theirs * scale.y;
    value.x = mine * value.x + theirs * other.x;
    value.y = mine * value.y + theirs * other.y;
    value.z = mine * value.z + theirs * other.z;
    value.w = mine * value.w + theirs * other.w;
    peak = higher;
  }
};

// Four columns of a head's result, once all keys are in it; a sink is added to its maximum and sum.
template <typename T>
__device__ inline uint2 finished(const DecodeParams& p, int head, Result& result) {
  auto& [peak, sum, value] = result;
  float weight = 1;
  if (p.sinks) {
    const float sink = kLog2e * to_float(static_cast<const T*>(p.sinks)[head]);
    const float higher = nan_max(peak, sink);
    weight = shrinking(peak, higher);
    sum = sum * weight + shrinking(sink, higher);
    peak = higher;
  }
  const float factor = sum == 0 ? 0.0f : weight / sum;  // NaN stays
  return make_uint2(pack(value.x * factor, value.y * factor, T{}), pack(value.z * factor, value.w * factor, T{}));
}

// Writes them.
template <typename T>
__device__ inline void finish(const DecodeParams& p, int batch, const Row& row, int column, Result result) {
  T* to =
      static_cast<T*>(p.out) + batch * p.out_strides.batch + row.head * p.out_strides.head + row.query * p.out_strides.row + column;
  *reinterpret_cast<uint2*>(to) = finished<T>(p, row.head, result);
  if (p.lse && column == 0) {
    const long long at = (static_cast<long long>(batch) * p.kv_heads * p.group + row.head) * p.q_length + row.query;
    p.lse[at] = result.sum == 0 ? -kInfinity : kLn2 * (result.peak + log2f(result.sum));
  }
}

// Writes four columns of a unit's row, or puts them aside for merging.
template <typename T>
__device__ inline void write_result(const DecodeParams& p, const Segment& s, int row, int column, const Result& result) {
  if (s.slot < 0) {
    finish<T>(p, s.batch, row_of(p, s, row), column, result);
    return;
  }
  const long long at = static_cast<long long>(s.slot) * p.block_rows + row;
  *reinterpret_cast<float4*>(p.partial_values + at * p.value_dim + column) = result.value;
  if (column == 0) {
    *reinterpret_cast<float2*>(p.partial_scales + at * 2) = make_float2(result.peak, result.sum);
  }
}

// Zeros for batch entries without keys, which have no parts.
template <typename T>
__device__ inline void write_nothing(const DecodeParams& p) {
  const int columns = p.value_dim / 4;
  for (int batch = blockIdx.x; p.stream_k.unit_tiles == 0 && batch < p.batch; batch += static_cast<int>(gridDim.x)) {
    if (span_of(p, batch).tiles == 0) {
      for (int index = threadIdx.x; index < p.kv_heads * p.group * p.q_length * columns; index += static_cast<int>(blockDim.x)) {
        const int row = index / columns;
        finish<T>(p, batch, {row / p.q_length, row % p.q_length}, index % columns * 4, {});
      }
    }
  }
}

// Reads the ticket of an incomplete unit before it is needed, in thread 0.
__device__ inline unsigned long long read_ticket(const DecodeParams& p, const Segment& s) {
  return s.slot >= 0 && threadIdx.x == 0 ? *static_cast<volatile unsigned long long*>(p.tickets + s.unit) : 0;
}

// Counts a part of a unit as written; true for the last of `parts`. A ticket is a call's number and a count: an older value
// belongs to another call, so tickets need no reset.
__device__ inline bool is_last_part(const DecodeParams& p, int unit, int parts, unsigned long long seen) {
  for (;;) {
    const unsigned long long next = (seen >> 16 == p.call ? seen : p.call << 16) + 1;
    const unsigned long long was = atomicCAS(p.tickets + unit, seen, next);
    if (was == seen) {
      const bool last = static_cast<int>(next & 0xffff) == parts;
      if (last) {
        p.tickets[unit] = 0;
      }
      return last;
    }
    seen = was;
  }
}

// The same, called by all threads of the block after they have written their part. `ticket`: its value as read by thread 0.
__device__ inline bool block_is_last(const DecodeParams& p, int unit, int parts, unsigned long long ticket, int* shared) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    *shared = is_last_part(p, unit, parts, ticket);
    __threadfence();
  }
  __syncthreads();
  const bool last = *shared != 0;
  __syncthreads();
  return last;
}

// Adds every `step`-th part of a row to a result; `AtOnce` are read at once.
template <int AtOnce>
__device__ inline void add_parts(const DecodeParams& p, const Parts& parts, int first, int step, int row, int column, Result& to) {
#pragma unroll 1
  for (int part = first; part < parts.count; part += step * AtOnce) {
    float2 scale[AtOnce];
    float4 from[AtOnce];
#pragma unroll
    for (int i = 0; i < AtOnce; ++i) {
      const int which = part + i * step;
      scale[i] = make_float2(-kInfinity, 0);
      from[i] = make_float4(0, 0, 0, 0);
      if (which < parts.count) {
        const long long at = static_cast<long long>(parts.slot(which)) * p.block_rows + row;
        scale[i] = __ldcg(reinterpret_cast<const float2*>(p.partial_scales + at * 2));
        from[i] = __ldcg(reinterpret_cast<const float4*>(p.partial_values + at * p.value_dim + column));
      }
    }
#pragma unroll
    for (int i = 0; i < AtOnce; ++i) {
      to.add(scale[i], from[i]);
    }
  }
}

// After a part of a unit has been put aside: who puts the last one aside merges all, in their order. `shared`: merge_bytes.
template <typename T>
__device__ inline void merge_parts(
    const DecodeParams& p, const Segment& s, const Parts& parts, unsigned long long ticket, float* shared) {
  if (!block_is_last(p, s.unit, parts.count, ticket, reinterpret_cast<int*>(shared))) {
    return;
  }
  const int threads = static_cast<int>(blockDim.x);
  const int thread = static_cast<int>(threadIdx.x);
  const int columns = p.value_dim / 4;
  const int tasks = s.rows * columns;
  const int groups = min(max(threads / tasks, 1), parts.count);  // that take turns at parts
  float4* values = reinterpret_cast<float4*>(shared);
  float2* scales = reinterpret_cast<float2*>(shared + 4 * threads);
#pragma unroll 1
  for (int first = 0; first < tasks; first += threads) {
    const int group = thread / tasks;  // 0 where there are more tasks than threads
    const int task = first + thread - group * tasks;
    const bool mine = task < tasks && group < groups;
    const int row = task / columns;
    const int column = task % columns * 4;
    Result result;
    if (mine) {
      add_parts<8>(p, parts, group, groups, row, column, result);
    }
    if (groups > 1) {
      values[thread] = result.value;
      scales[thread] = make_float2(result.peak, result.sum);
      __syncthreads();
      for (int other = 1; mine && group == 0 && other < groups; ++other) {
        result.add(scales[other * tasks + thread], values[other * tasks + thread]);
      }
    }
    if (mine && group == 0) {
      finish<T>(p, s.batch, row_of(p, s, row), column, result);
    }
  }
}

// The slices of a block have put their results of `held` rows into shared memory: [slice][row][Pitch] and [slice][row][maximum,
// sum]. Merges them in their order.
template <typename T, int Pitch>
__device__ inline void merge_slices(
    const DecodeParams& p, const Segment& s, const float* results, const float* scales, int slices, int held) {
  constexpr int kAtOnce = 8;
  const int columns = p.value_dim / 4;
#pragma unroll 1
  for (int index = threadIdx.x; index < s.rows * columns; index += static_cast<int>(blockDim.x)) {
    const int row = index / columns;
    const int column = index % columns * 4;
    Result result;
    float4& value = result.value;
#pragma unroll 1
    for (int first = 0; first < slices; first += kAtOnce) {
      float2 scale[kAtOnce];  // a maximum and a sum
      float4 from[kAtOnce];
      float higher = result.peak;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int at = min(first + i, slices - 1) * held + row;
        scale[i] = *reinterpret_cast<const float2*>(scales + at * 2);
        from[i] = *reinterpret_cast<const float4*>(results + at * Pitch + column);
        if (first + i >= slices) {
          scale[i] = make_float2(-kInfinity, 0);
        }
        higher = nan_max(higher, scale[i].x);
      }
      const float before = shrinking_approx(result.peak, higher);
      result.sum *= before;
      value = make_float4(value.x * before, value.y * before, value.z * before, value.w * before);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float weight = shrinking_approx(scale[i].x, higher);
        result.sum += weight * scale[i].y;
        value.x += weight * from[i].x;
        value.y += weight * from[i].y;
        value.z += weight * from[i].z;
        value.w += weight * from[i].w;
      }
      result.peak = higher;
    }
    write_result<T>(p, s, row, column, result);
  }
}

// The merge kernel, after kernels without tickets: one block for each query of each head merges the partial results, in their
// order, and writes zeros if there are none.
template <typename T>
__device__ inline void merge(const DecodeParams& p) {
  __shared__ float4 values[8][128];  // [group][lane]
  __shared__ float2 scales[8];
  const int index = blockIdx.x;  // [B, H, Tq]
  const int heads = p.kv_heads * p.group;
  const Row place{index / p.q_length % heads, index % p.q_length};
  const int batch = index / p.q_length / heads;
  const int row = place.head % p.group * p.q_length + place.query;
  const int lanes = static_cast<int>(blockDim.x) / p.merge_groups;
  const int group = threadIdx.x / lanes;
  const int lane = threadIdx.x % lanes;
  const int column = lane * 4;
  const bool mine = column < p.value_dim;
  Result result;
  const bool even = p.stream_k.unit_tiles > 0;
  const int tiles = even ? static_cast<int>(p.stream_k.unit_tiles) : span_of(p, batch).tiles;
  if (tiles > 0) {
    const unsigned before = even ? batch * (tiles * p.kv_heads * p.row_blocks) : tiles_before(p, batch);
    const int unit = place.head / p.group * p.row_blocks + row / p.block_rows;
    const Parts parts = parts_of(share_tiles(p), batch * p.kv_heads * p.row_blocks + unit, before + unit * tiles, tiles);
    if (parts.count == 1) {
      return;  // its block has written the result
    }
    if (mine) {
      add_parts<4>(p, parts, group, p.merge_groups, row % p.block_rows, column, result);
    }
    if (p.merge_groups > 1) {
      values[group][lane] = result.value;
      if (lane == 0) {
        scales[group] = make_float2(result.peak, result.sum);
      }
      __syncthreads();
      for (int other = 1; group == 0 && other < p.merge_groups; ++other) {
        result.add(scales[other], values[other][lane]);
      }
    }
  }
  if (group == 0 && mine) {
    finish<T>(p, batch, place, column, result);
  }
}

}  // namespace mlx_cuda
