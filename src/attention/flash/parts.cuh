// What the kernels of flash.cu are made of: rows on their way to shared memory, the tiles of keys that a tile of rows goes
// over, and which keys a row sees.
#pragma once

#include "attention/flash/params.h"

#include "device/mma.cuh"
#include "device/numbers.cuh"
#include "device/vector.cuh"

namespace mlx_cuda {

// A maximum may be this much too low, in units of log2: weights grow to 64 at most, and the sums are scaled less often.
[[maybe_unused]] constexpr float kSlack = 6;

// Rows [first, first + Rows) of a matrix into shared memory; zeros for those outside [begin, end) and for columns that are not
// there. There they are 16 bytes longer than the data: eight rows in turn then lie in different banks.
template <int Rows, int Bytes, int Threads>
__device__ inline void load_rows(
    unsigned to, const char* from, long long row_bytes, int column_bytes, int first, int begin, int end) {
  constexpr int kUnits = Bytes % 128 == 0 ? 8 : 4;  // of 16 bytes, that adjacent threads copy
  constexpr int kRowsAtOnce = Threads / kUnits;
  constexpr int kPitch = Bytes + 16;
  static_assert(Rows % kRowsAtOnce == 0 && Bytes % (kUnits * 16) == 0);
  const int column = threadIdx.x % kUnits * 16;
  const int row = threadIdx.x / kUnits;
  to += row * kPitch + column;
#pragma unroll
  for (int i = 0; i < Rows / kRowsAtOnce; ++i) {
    const int at = first + row + i * kRowsAtOnce;
    const bool there = at >= begin && at < end;
    const char* source = from + (there ? at * row_bytes : 0) + column;
#pragma unroll
    for (int b = 0; b < Bytes; b += kUnits * 16) {
      copy16_async(to + i * kRowsAtOnce * kPitch + b, source + b, there && column + b < column_bytes);
    }
  }
}

__device__ inline void round_to_tf32(float* values) {
  float4 four = *reinterpret_cast<float4*>(values);
  *reinterpret_cast<uint4*>(values) = make_uint4(to_tf32(four.x), to_tf32(four.y), to_tf32(four.z), to_tf32(four.w));
}

__device__ inline float load_shared(unsigned address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
  return value;
}

// A barrier of the warps that share rows.
__device__ inline void meet(int group, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "r"(threads) : "memory");
}

// cap * tanh(score * scale / cap), in units of log2.
__device__ inline float capped(float score, float inner, float outer) {
  return fmaf(reciprocal_approx(exp2_approx(score * inner) + 1.0f), -2.0f * outer, outer);
}

// Goes over the tiles of keys that a tile of rows has to see, in ascending order.
struct Walk {
  const int* list;  // of a mask; null: all
  int index;
  int count;
  int tile;
  int last;
  bool unmasked;  // the mask hides nothing of this tile

  __device__ void read() {
    if (list && index < count) {
      const int entry = list[index];
      tile = entry >> 1;
      unmasked = entry & 1;
    } else if (list) {
      tile = last;
    }
  }
  __device__ void start(int first) {
    tile = first;
    unmasked = true;
    index = 0;
    if (list) {
      for (int size = count; size > 0;) {  // the first entry from `first` on
        const int half = size / 2;
        if (list[index + half] >> 1 < first) {
          index += half + 1;
          size -= half + 1;
        } else {
          size = half;
        }
      }
      read();
    }
  }
  __device__ void advance() {
    ++index;
    ++tile;
    read();
  }
  __device__ bool done() const {
    return tile >= last;
  }
};

// Which keys the rows of one tile see by their place.
struct Sight {
  int begin;
  int end;
  int left;
  int right;

  __device__ int from(int place) const {
    return left < 0 ? begin : max(begin, place - left);
  }
  __device__ int to(int place) const {
    return right < 0 ? end : min(end, place + right + 1);
  }
};

template <typename T, bool General, int NT>
__device__ inline void restrict_row(
    const FlashParams& p,
    float (&scores)[NT][4],
    int half,
    float unit,
    const Sight& sight,
    int place,
    int key0,
    const unsigned* bits,
    const T* bias,
    float bias_shift) {
  const int c = threadIdx.x % 4;
  const int from = sight.from(place);
  const int to = sight.to(place);
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    const unsigned word = General && bits ? bits[(key0 + n * 8) / 32] >> ((key0 + n * 8) % 32 + 2 * c) : ~0u;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int key = key0 + n * 8 + 2 * c + e;
      float& score = scores[n][half * 2 + e];
      bool seen = key >= from && key < to && (word >> e & 1);
      if (General && bias) {
        const float more = seen ? to_float(bias[key * p.mask.strides[3]]) - bias_shift : -kInfinity;
        seen = more != -kInfinity;
        score = fmaxf(fmaf(kLog2e, more, score * unit), -kLargest);  // a finite number stays finite, however low
      }
      score = seen ? score : -kInfinity;
    }
  }
}

}  // namespace mlx_cuda
