// Operands of linear attention as they are stored, and what a token does to rows of the state.
#pragma once

#include "device/vector.cuh"
#include "recurrence/recurrent_params.h"

namespace mlx_cuda {

// An element as it is stored, and what it is. Between the two others can be loaded: nothing waits for memory in a branch.
__device__ inline unsigned load(const void* data, long long at, Stored type) {
  return type == Stored::float32 ? static_cast<const unsigned*>(data)[at] : static_cast<const unsigned short*>(data)[at];
}
__device__ inline float number(unsigned raw, Stored type) {
  return type == Stored::float16 ? __half2float(__ushort_as_half(static_cast<unsigned short>(raw)))
                                 : __uint_as_float(type == Stored::float32 ? raw : raw << 16);
}

__device__ inline void store(void* data, long long at, float value, Stored type) {
  switch (type) {
    case Stored::float32:
      static_cast<float*>(data)[at] = value;
      break;
    case Stored::float16:
      static_cast<__half*>(data)[at] = from_float<__half>(value);
      break;
    default:
      static_cast<__nv_bfloat16*>(data)[at] = from_float<__nv_bfloat16>(value);
  }
}

// Four adjacent elements as they are stored, on as many bytes as they take.
__device__ inline uint4 load4(const void* data, long long at, Stored type) {
  if (type == Stored::float32) {
    return *reinterpret_cast<const uint4*>(static_cast<const float*>(data) + at);
  }
  const uint2 half = *reinterpret_cast<const uint2*>(static_cast<const unsigned short*>(data) + at);
  return make_uint4(half.x, half.y, 0, 0);
}

__device__ inline float4 numbers(uint4 raw, Stored type) {
  if (type == Stored::float32) {
    return make_float4(__uint_as_float(raw.x), __uint_as_float(raw.y), __uint_as_float(raw.z), __uint_as_float(raw.w));
  }
  const auto element = [&](unsigned pair, int i) { return number(i ? pair >> 16 : pair & 0xffff, type); };
  return make_float4(element(raw.x, 0), element(raw.x, 1), element(raw.y, 0), element(raw.y, 1));
}

__device__ inline long long place(const Operand& of, long long batch, long long token, long long head) {
  return batch * of.batch + token * of.token + head * of.head;
}

__device__ inline bool is_seen(const Recurrence& p, long long batch, long long token) {
  return !p.mask || p.mask[batch * p.mask_batch + token * p.mask_token];
}

__device__ inline float sum(float4 a) {
  return a.x + a.y + (a.z + a.w);
}
__device__ inline float4 product(float4 a, float4 b) {
  return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w);
}
__device__ inline float4 product_sum(float4 a, float4 b, float4 c) {
  return make_float4(fmaf(a.x, b.x, c.x), fmaf(a.y, b.y, c.y), fmaf(a.z, b.z, c.z), fmaf(a.w, b.w, c.w));
}
__device__ inline float4 all(float x) {
  return make_float4(x, x, x, x);
}

// What a block is there for: rows of the state of one head and sequence, and its tokens.
struct Work {
  int head, key_head, sequence, batch, begin, end;
  int first_row = 0;

  __device__ Work(const Recurrence& p, int head_of_all) {
    head = head_of_all % p.value_heads;
    key_head = head / (p.value_heads / p.key_heads);
    sequence = head_of_all / p.value_heads;
    batch = p.offsets ? 0 : sequence;
    begin = p.offsets ? max(p.offsets[sequence], 0) : 0;
    end = p.offsets ? min(p.offsets[sequence + 1], p.length) : p.length;
  }
  __device__ explicit Work(const Recurrence& p) : Work(p, blockIdx.x / tiles(p)) {
    first_row = blockIdx.x % tiles(p) * kRecurrentRows;
  }

  __device__ long long out(const Recurrence& p, int token, int row) const {
    return ((static_cast<long long>(batch) * p.length + token) * p.value_heads + head) * p.value_size + first_row + row;
  }

 private:
  __device__ static int tiles(const Recurrence& p) {
    return (p.value_size + kRecurrentRows - 1) / kRecurrentRows;
  }
};

// Elements of some rows of the state, four at a time, the lanes that share them in turns.
template <int Count, int Keys>
struct Rows {
  static constexpr int kSteps = Keys / kRecurrentKeys;
  float4 at[Count][kSteps];

  // The first of them is `row` of the block, and the others follow `Apart` after each other.
  template <int Apart>
  __device__ void load(const Recurrence& p, const Work& work, int row) {
    each<Apart>(
        p, work, row, [&](float4& mine, long long place) { mine = *reinterpret_cast<const float4*>(p.state_in + place); },
        p.state_in);
  }
  template <int Apart>
  __device__ void store(const Recurrence& p, const Work& work, int row) {
    each<Apart>(p, work, row, [&](float4& mine, long long place) { *reinterpret_cast<float4*>(p.state_out + place) = mine; }, true);
  }

  // S = g S, S += (v - S k) beta k^T, or without S k; gives S q, of which every lane has the whole.
  __device__ void advance(
      bool delta,
      const float4 (&g)[kSteps],
      const float4 (&k)[kSteps],
      const float4 (&q)[kSteps],
      const float (&v)[Count],
      float beta,
      float qk,
      float (&y)[Count]) {
    float found[Count];
#pragma unroll
    for (int r = 0; r < Count; ++r) {
      float4 with_k{}, with_q{};
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
        at[r][j] = product(at[r][j], g[j]);
        with_k = product_sum(at[r][j], k[j], with_k);
        with_q = product_sum(at[r][j], q[j], with_q);
      }
      found[r] = sum(with_k);
      y[r] = sum(with_q);
    }
#pragma unroll
    for (int away = 1; away < kRecurrentLanes; away *= 2) {
#pragma unroll
      for (int r = 0; r < Count; ++r) {
        found[r] += __shfl_xor_sync(~0u, found[r], away);
        y[r] += __shfl_xor_sync(~0u, y[r], away);
      }
    }
#pragma unroll
    for (int r = 0; r < Count; ++r) {
      const float change = (v[r] - (delta ? found[r] : 0.0f)) * beta;
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
        at[r][j] = product_sum(k[j], all(change), at[r][j]);
      }
      y[r] = fmaf(change, qk, y[r]);
    }
  }

 private:
  template <int Apart, typename Do>
  __device__ void each(const Recurrence& p, const Work& work, int row, Do&& with, bool there) {
    const int lane = threadIdx.x % kRecurrentLanes;
    const long long first = (static_cast<long long>(work.sequence) * p.value_heads + work.head) * p.value_size + work.first_row;
#pragma unroll
    for (int r = 0; r < Count; ++r, row += Apart) {
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
        const int element = j * kRecurrentKeys + lane * 4;
        if (there && work.first_row + row < p.value_size && element < p.key_size) {
          with(at[r][j], (first + row) * p.key_size + element);
        } else {
          at[r][j] = float4{};
        }
      }
    }
  }
};

}  // namespace mlx_cuda
