// How results of the decode kernels are written, and how those of a unit's parts become one: in the order of the parts, whoever
// merges them, so that a result does not depend on timing.
#pragma once

#include "attention/decode/rows.cuh"

namespace mlx_cuda {

// Writes four columns of a finished row from their numerators.
template <typename T>
__device__ inline void finish(const DecodeParams& p, int batch, const Row& row, int column, float top, float total, float4 value) {
  float weight = 1;
  if (p.sinks) {
    const float sink = kLog2e * to_float(static_cast<const T*>(p.sinks)[row.head]);
    const float higher = fmaxf(top, sink);
    weight = top == -kInfinity ? 0.0f : exp2f(top - higher);
    total = total * weight + (sink == -kInfinity ? 0.0f : exp2f(sink - higher));
    top = higher;
  }
  const float factor = total > 0 ? weight / total : 0.0f;
  T* to =
      static_cast<T*>(p.out) + batch * p.out_strides.batch + row.head * p.out_strides.head + row.query * p.out_strides.row + column;
  *reinterpret_cast<uint2*>(to) =
      make_uint2(pack(value.x * factor, value.y * factor, T{}), pack(value.z * factor, value.w * factor, T{}));
  if (p.lse && column == 0) {
    const long long at = (static_cast<long long>(batch) * p.kv_heads * p.group + row.head) * p.q_length + row.query;
    p.lse[at] = total > 0 ? kLn2 * (top + log2f(total)) : -kInfinity;
  }
}

// Writes four columns of a unit's row, or puts them aside for merging.
template <typename T>
__device__ inline void write_result(
    const DecodeParams& p, const Segment& s, int row, int column, float top, float total, float4 value) {
  if (s.slot < 0) {
    finish<T>(p, s.batch, row_of(p, s, row), column, top, total, value);
    return;
  }
  const long long at = static_cast<long long>(s.slot) * p.block_rows + row;
  *reinterpret_cast<float4*>(p.partial + at * p.value_dim + column) = value;
  if (column == 0) {
    *reinterpret_cast<float2*>(p.partial_scale + at * 2) = make_float2(top, total);
  }
}

// Zeros for the batch entries of which there are no keys, which nobody has a part of.
template <typename T>
__device__ inline void write_nothing(const DecodeParams& p) {
  const int columns = p.value_dim / 4;
  for (int batch = blockIdx.x; p.unit_tiles == 0 && batch < p.batch; batch += static_cast<int>(gridDim.x)) {
    if (span_of(p, batch).tiles == 0) {
      for (int index = threadIdx.x; index < p.kv_heads * p.group * p.q_length * columns; index += static_cast<int>(blockDim.x)) {
        const int row = index / columns;
        finish<T>(p, batch, {row / p.q_length, row % p.q_length}, index % columns * 4, -kInfinity, 0.0f, make_float4(0, 0, 0, 0));
      }
    }
  }
}

// Reads the ticket of an incomplete unit before it is needed, in thread 0.
__device__ inline unsigned long long read_ticket(const DecodeParams& p, const Segment& s) {
  return s.slot >= 0 && threadIdx.x == 0 ? *static_cast<volatile unsigned long long*>(p.tickets + s.unit) : 0;
}

// Counts a part of a unit as written; true for the last of `parts`. A ticket is the number of the call that it counts for and the
// count: whatever it held before is another call's, so nobody has to clear it.
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

// After a part of a unit has been put aside: who puts the last one aside merges all, in their order. `ticket`: what has been read
// of the unit's in thread 0. `shared`: 6 numbers for each thread of the block.
template <typename T>
__device__ inline void merge_parts(
    const DecodeParams& p, const Segment& s, const Parts& parts, unsigned long long ticket, float* shared) {
  constexpr int kAtOnce = 8;
  const int threads = static_cast<int>(blockDim.x);
  const int thread = static_cast<int>(threadIdx.x);
  __syncthreads();
  if (thread == 0) {
    __threadfence();
    *reinterpret_cast<int*>(shared) = is_last_part(p, s.unit, parts.count, ticket);
    __threadfence();
  }
  __syncthreads();
  const bool last = *reinterpret_cast<int*>(shared) != 0;
  __syncthreads();
  if (!last) {
    return;
  }
  const int columns = p.value_dim / 4;
  const int tasks = s.rows * columns;
  const int groups = min(max(threads / tasks, 1), parts.count);  // that take parts in turn
  float4* values = reinterpret_cast<float4*>(shared);
  float2* scales = reinterpret_cast<float2*>(shared + 4 * threads);
#pragma unroll 1
  for (int first = 0; first < tasks; first += threads) {
    const int group = thread / tasks;  // 0 where there are more tasks than threads
    const int task = first + thread - group * tasks;
    const bool mine = task < tasks && group < groups;
    const int row = task / columns;
    const int column = task % columns * 4;
    float top = -kInfinity;
    float total = 0;
    float4 value = make_float4(0, 0, 0, 0);
    auto add = [&](const float2& scale, const float4& part) {  // a maximum and a sum
      const float higher = fmaxf(top, scale.x);
      const float ours = top == -kInfinity ? 0.0f : exp2_approx(top - higher);
      const float theirs = scale.x == -kInfinity ? 0.0f : exp2_approx(scale.x - higher);
      total = ours * total + theirs * scale.y;
      value.x = ours * value.x + theirs * part.x;
      value.y = ours * value.y + theirs * part.y;
      value.z = ours * value.z + theirs * part.z;
      value.w = ours * value.w + theirs * part.w;
      top = higher;
    };
#pragma unroll 1
    for (int part = group; mine && part < parts.count; part += groups * kAtOnce) {
      float2 scale[kAtOnce];
      float4 from[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int which = part + i * groups;
        scale[i] = make_float2(-kInfinity, 0);
        from[i] = make_float4(0, 0, 0, 0);
        if (which < parts.count) {
          const long long at =
              static_cast<long long>(which == 0 ? parts.head : parts.tail + which * parts.pitch) * p.block_rows + row;
          scale[i] = __ldcg(reinterpret_cast<const float2*>(p.partial_scale + at * 2));
          from[i] = __ldcg(reinterpret_cast<const float4*>(p.partial + at * p.value_dim + column));
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        add(scale[i], from[i]);
      }
    }
    if (groups > 1) {
      values[thread] = value;
      scales[thread] = make_float2(top, total);
      __syncthreads();
      for (int other = 1; mine && group == 0 && other < groups; ++other) {
        add(scales[other * tasks + thread], values[other * tasks + thread]);
      }
    }
    if (mine && group == 0) {
      finish<T>(p, s.batch, row_of(p, s, row), column, top, total, value);
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
    float top = -kInfinity;
    float total = 0;
    float4 value = make_float4(0, 0, 0, 0);
#pragma unroll 1
    for (int first = 0; first < slices; first += kAtOnce) {
      float2 scale[kAtOnce];  // a maximum and a sum
      float4 from[kAtOnce];
      float higher = top;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int at = min(first + i, slices - 1) * held + row;
        scale[i] = *reinterpret_cast<const float2*>(scales + at * 2);
        from[i] = *reinterpret_cast<const float4*>(results + at * Pitch + column);
        if (first + i >= slices) {
          scale[i] = make_float2(-kInfinity, 0);
        }
        higher = fmaxf(higher, scale[i].x);
      }
      const float before = top == -kInfinity ? 0.0f : exp2_approx(top - higher);
      total *= before;
      value = make_float4(value.x * before, value.y * before, value.z * before, value.w * before);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float weight = scale[i].x == -kInfinity ? 0.0f : exp2_approx(scale[i].x - higher);
        total += weight * scale[i].y;
        value.x += weight * from[i].x;
        value.y += weight * from[i].y;
        value.z += weight * from[i].z;
        value.w += weight * from[i].w;
      }
      top = higher;
    }
    write_result<T>(p, s, row, column, top, total, value);
  }
}

}  // namespace mlx_cuda
