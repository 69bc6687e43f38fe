// Stored operands of linear attention, and the update of the state's rows by a token.
#pragma once

#include "device/reduce.cuh"
#include "device/vector.cuh"
#include "recurrence/recurrent_params.h"

namespace mlx_cuda {

// An element as stored, and its value. Other loads can be issued between the two: no branch waits for memory.
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

// Four adjacent elements as stored, aligned to their size.
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
__device__ inline float4 multiply(float4 a, float4 b) {
  return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w);
}
__device__ inline float4 multiply_add(float4 a, float4 b, float4 c) {
  return make_float4(fmaf(a.x, b.x, c.x), fmaf(a.y, b.y, c.y), fmaf(a.z, b.z, c.z), fmaf(a.w, b.w, c.w));
}
__device__ inline float4 all(float x) {
  return make_float4(x, x, x, x);
}

// The work of a block: rows of the state of one head and sequence, and its tokens.
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

// Elements of some rows of the state, four at a time; the lanes that share them take turns.
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
        at[r][j] = multiply(at[r][j], g[j]);
        with_k = multiply_add(at[r][j], k[j], with_k);
        with_q = multiply_add(at[r][j], q[j], with_q);
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
        at[r][j] = multiply_add(k[j], all(change), at[r][j]);
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

// Tokens [begin, end) in order, eight lanes for rows of the state, `Apart` after each other: recurrent.cu has the formulas. A
// masked token leaves the state unchanged, and gives zeros.
template <int Apart, bool Channels, int Count, int Keys>
__device__ inline void advance_tokens(
    const Recurrence& p, const Work& work, Rows<Count, Keys>& state, int row, int begin, int end) {
  constexpr int kSteps = Keys / kRecurrentKeys;
  const int lane = threadIdx.x % kRecurrentLanes;
  const auto is_row = [&](int r) { return work.first_row + row + r * Apart < p.value_size; };
  for (int token = begin; token < end; ++token) {
    const bool seen = is_seen(p, work.batch, token);
    uint4 raw_k[kSteps]{}, raw_q[kSteps]{}, raw_g[kSteps]{};
    unsigned decay = 0, beta = 0, values[Count]{};
    if (seen) {
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
        const int element = j * kRecurrentKeys + lane * 4;
        if (element < p.key_size) {
          raw_k[j] = load4(p.k.data, place(p.k, work.batch, token, work.key_head) + element, p.k.type);
          raw_q[j] = load4(p.q.data, place(p.q, work.batch, token, work.key_head) + element, p.q.type);
          if constexpr (Channels) {
            raw_g[j] = load4(p.g.data, place(p.g, work.batch, token, work.head) + element, p.g.type);
          }
        }
      }
      if constexpr (!Channels) {
        decay = load(p.g.data, place(p.g, work.batch, token, work.head), p.g.type);
      }
      beta = load(p.beta.data, place(p.beta, work.batch, token, work.head), p.beta.type);
#pragma unroll
      for (int r = 0; r < Count; ++r) {
        if (is_row(r)) {
          values[r] = load(p.v.data, place(p.v, work.batch, token, work.head) + work.first_row + row + r * Apart, p.v.type);
        }
      }
    }
    float4 g[kSteps], k[kSteps], q[kSteps];
    float qk = 0;
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      k[j] = numbers(raw_k[j], p.k.type);
      q[j] = numbers(raw_q[j], p.q.type);
      g[j] = !seen ? all(1) : Channels ? numbers(raw_g[j], p.g.type) : all(number(decay, p.g.type));
      qk += sum(multiply(q[j], k[j]));
    }
    qk = of_near_lanes<1, kRecurrentLanes>(qk, Sum{});
    float v[Count], y[Count];
#pragma unroll
    for (int r = 0; r < Count; ++r) {
      v[r] = number(values[r], p.v.type);
    }
    state.advance(p.delta, g, k, q, v, number(beta, p.beta.type), qk, y);
#pragma unroll
    for (int r = 0; r < Count; ++r) {
      if (lane == 0 && is_row(r)) {
        store(p.out, work.out(p, token, row + r * Apart), seen ? y[r] : 0.0f, p.v.type);
      }
    }
  }
}

}  // namespace mlx_cuda
