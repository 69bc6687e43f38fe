// Operands of the GEMVs: x in shared memory, and the MMA of a unit of a tile of w with it. w is the left operand (M), 16 rows of
// it; the 8 columns (N) are rows of x. Any permutation of inner works as the k index as long as both agree: a thread's values of
// a row of w are adjacent in memory, 16 bytes of a span, which four threads share.
#pragma once

#include "device/mma.cuh"
#include "device/ptx.cuh"
#include "device/reduce.cuh"
#include "device/vector.cuh"
#include "matmul/gemv/integers.cuh"
#include "matmul/gemv/params.h"

namespace mlx_cuda {

// The layout of shared memory: x, zeros for unused columns, and a step and a sum of each group of x.
struct RowMemory {
  unsigned char* x;
  unsigned char* zeros;
  float2* groups;
};

// Two values of x times the norm's weights, where there are any.
template <typename T>
__device__ inline float2 normed(const uint4& x, bool any, const uint4& norms, int pair, float factor) {
  float2 two = unpack(word(x, pair), T{});
  if (any) {
    const float2 by = unpack(word(norms, pair), T{});
    two = make_float2(two.x * factor * by.x, two.y * factor * by.y);
  }
  return two;
}
template <typename T>
__device__ inline uint4 all_normed(const uint4& x, bool any, const uint4& norms, float factor) {
  if (!any) {
    return x;
  }
  unsigned pairs[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float2 two = normed<T>(x, any, norms, j, factor);
    pairs[j] = pack(two.x, two.y, T{});
  }
  return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// The swizzled position of a 16-byte piece of a row of w in a stage: without bank conflicts in the 128 bytes that threads read at
// once.
template <int Bits>
__device__ inline int ring_place(int row, int piece) {
  constexpr GemvForm form{Bits};
  return row * form.ring_bytes() + (form.unit_bytes() == 128 ? piece ^ row % 2 * 4 : piece) * 16;
}
// A thread's part of a row and span of 128 bytes.
__device__ inline uint4 words_of(const unsigned char* w, int row, int span, int member) {
  return *reinterpret_cast<const uint4*>(w + ring_place<16>(row, span * 4 + member));
}

// Whether x times a norm's weights may be more than there are numbers for, before it is divided by its size.
template <typename T>
inline constexpr bool kShortRange = false;
template <>
inline constexpr bool kShortRange<__half> = true;

// 16-bit numbers.
template <typename TypeOf>
class PlainRows {
  using Params = GemvParams;

 public:
  using T = TypeOf;
  static constexpr GemvForm kForm{16};
  // In other cases the final sums are divided by the norm of x, so that no thread waits for it.
  static constexpr bool kSizeFirst = kShortRange<T>;

  static __device__ constexpr GemvForm form(const Params&) {
    return kForm;
  }

  __device__ PlainRows(const Params& p, const RowMemory& memory) : p_(p), memory_(memory) {}

  __device__ void put(int row, int piece, bool there, const uint4& x, bool any, const uint4& norms, float factor) const {
    if (there) {
      reinterpret_cast<uint4*>(memory_.x + row * p_.x_distance(kForm))[piece] = all_normed<T>(x, any, norms, factor);
    }
  }

  __device__ void find_columns(int group, int member) {
    const bool mine = group < p_.rows;
    x_ = mine ? memory_.x + group * p_.x_distance(kForm) + member * 16 : memory_.zeros;
    step_ = mine ? kForm.unit_values() * 2 : 0;
    member_ = member;
    group_ = group;
  }

  template <bool Both>
  __device__ void multiply(const unsigned char* w, const unsigned char*, int, int unit) {
#pragma unroll
    for (int span = 0; span < 2; ++span) {
      const uint4 low = words_of(w, group_, span, member_);
      const uint4 high = Both ? words_of(w, group_ + Params::kHalfRows, span, member_) : make_uint4(0, 0, 0, 0);
      const uint4 v = *reinterpret_cast<const uint4*>(x_ + unit * step_ + span * 64);
      mma(totals_, make_uint4(low.x, high.x, low.y, high.y), v.x, v.y, T{});
      mma(totals_, make_uint4(low.z, high.z, low.w, high.w), v.z, v.w, T{});
    }
  }

  // Gives (half, row of x, value) of what has been summed, and begins again.
  template <typename Put>
  __device__ void give(const Put& put) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      put(i / 2, member_ * 2 + i % 2, totals_[i]);
      totals_[i] = 0.0f;
    }
  }

 private:
  const Params& p_;
  const RowMemory memory_;
  const unsigned char* x_;
  int step_;  // bytes from unit to unit
  int group_;
  int member_;
  float totals_[4] = {};  // rows g and g + 8, of two columns each
};

// Packed integers, whose MMAs need integers only (integers.cuh): a group of x has two columns, one for each digit. If a span of w
// has several scales, each has columns of its own, which are zero elsewhere.
template <typename TypeOf, int BitsOf, int GroupOf>
class IntegerRows {
  using Params = GemvParams;

 public:
  using T = TypeOf;
  static constexpr GemvForm kForm{BitsOf, GroupOf == 32 ? 5 : GroupOf == 64 ? 6 : 7};
  static constexpr bool kSizeFirst = false;
  static __device__ constexpr GemvForm form(const Params&) {
    return kForm;
  }

  __device__ IntegerRows(const Params& p, const RowMemory& memory)
      : p_(p), memory_(memory), groups_(p.groups_of_span(kForm)), digit_(p.x_distance(kForm) / 2) {}

  // By whole warps, which have adjacent pieces of 8 values.
  __device__ void put(int row, int piece, bool there, const uint4& x, bool any, const uint4& norms, float factor) const {
    float values[8];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 two = normed<T>(x, any, norms, j, factor);
      values[2 * j] = two.x;
      values[2 * j + 1] = two.y;
    }
    constexpr int lanes = kSpan / kSpanScales / 8;
    const IntegerPiece integers = to_integers<kBits, lanes>(values);
    if (!there) {
      return;
    }
    // The upper and lower halves of a piece, permuted as those of w in an MMA.
    const int in_span = piece % (kSpan / 8);
    const int at = piece / (kSpan / 8) * kSpan + (in_span % kPieces / 2 * 4 + in_span / kPieces) * 16 + in_span % kPieces % 2 * 8;
    unsigned char* to = memory_.x + row * 2 * digit_ + at;
    *reinterpret_cast<uint2*>(to) = integers.upper;
    *reinterpret_cast<uint2*>(to + digit_) = integers.lower;
    if (threadIdx.x % lanes == 0) {
      const int group = piece / lanes;
      memory_.groups[group / kSpanScales * groups_ + row * kSpanScales + group % kSpanScales] = integers.group;
    }
  }

  __device__ void find_columns(int group, int member) {
    const int pair = group / 2;
    const int row = pair / kSpanScales;
    const bool mine = row < p_.rows && member * kSpanScales / 4 == pair % kSpanScales;
    x_ = mine ? memory_.x + (row * 2 + group % 2) * digit_ + member * 16 : memory_.zeros;
    step_ = mine ? kForm.unit_values() : 0;
    member_ = member;
    group_ = group;
  }

  // Both: the tile has rows in its second half. `scales`: of the thread's first row and the unit; biases are `to_biases` on.
  template <bool Both>
  __device__ void multiply(const unsigned char* w, const unsigned char* scales, int to_biases, int unit) {
    constexpr int halves = Both ? 2 : 1;
#pragma unroll
    for (int span = 0; span < 2; ++span) {
      const uint4 low = words_of(w, group_, span, member_);
      const uint4 high = Both ? words_of(w, group_ + Params::kHalfRows, span, member_) : make_uint4(0, 0, 0, 0);
      int sums[4] = {};
#pragma unroll
      for (int i = 0; i < kPieces; i += 2) {
        const uint4 v = *reinterpret_cast<const uint4*>(x_ + unit * step_ + span * kSpan + 32 * i);
        multiply_bytes(sums, operand(low, high, i), v.x, v.y);
        multiply_bytes(sums, operand(low, high, i + 1), v.z, v.w);
      }
      const int scale_at = (kScales == 1 ? 0 : span * kSpanScales + member_ % kSpanScales) * 2;
      const float2 group = memory_.groups[(unit * 2 + span) * groups_ + min(member_, groups_ - 1)];
#pragma unroll
      for (int half = 0; half < halves; ++half) {
        const unsigned char* from = scales + half * Params::kHalfRows * p_.scales_distance(kForm) + scale_at;
        const float scale = to_float(*reinterpret_cast<const T*>(from));
        const float bias = to_float(*reinterpret_cast<const T*>(from + to_biases));
        const int sum = sums[2 * half] * 128 + sums[2 * half + 1];
        totals_[half] = fmaf(scale * group.x, static_cast<float>(sum), fmaf(bias, group.y, totals_[half]));
      }
    }
  }

  template <typename Put>
  __device__ void give(const Put& put) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float value = lanes_sum<kSpanScales>(totals_[half]);
      put(half, member_ % kSpanScales == 0 ? member_ / kSpanScales : kForm.most_rows(), value);
      totals_[half] = 0.0f;
    }
  }

 private:
  static constexpr int kBits = kForm.bits;
  static constexpr int kSpan = kForm.span_values();
  static constexpr int kSpanScales = kForm.scales_of_span();
  static constexpr int kScales = kForm.unit_values() >> kForm.group_shift;
  static constexpr int kPieces = kSpan / 32;  // of 8 values, that a thread has of a row and span

  // Piece `i` of 8 values of a row, and of the one 8 below.
  static __device__ uint4 operand(const uint4& low, const uint4& high, int i) {
    if constexpr (kBits == 4) {
      constexpr unsigned mask = 0x0f0f0f0fu;
      return make_uint4(word(low, i) & mask, word(high, i) & mask, word(low, i) >> 4 & mask, word(high, i) >> 4 & mask);
    } else {
      return make_uint4(word(low, 2 * i), word(high, 2 * i), word(low, 2 * i + 1), word(high, 2 * i + 1));
    }
  }

  const Params& p_;
  const RowMemory memory_;
  const int groups_;  // of a span, of all rows of x
  const int digit_;   // bytes between the two halves of a row's integers
  const unsigned char* x_;
  int step_;  // bytes from unit to unit
  int group_;
  int member_;
  float totals_[2] = {};  // rows g and g + 8
};

}  // namespace mlx_cuda
