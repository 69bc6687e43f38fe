// Dequantization for tensor cores: packed values from memory, times their scales.
#pragma once

#include "device/ptx.cuh"
#include "matmul/quantized/unpack.cuh"

namespace mlx_cuda {

template <bool Kept, int Words>
__device__ inline void load_chunk(unsigned (&chunk)[Words], const char* from) {
  constexpr int at_once = Words % 4 == 0 ? 4 : Words % 2 == 0 ? 2 : 1;
#pragma unroll
  for (int i = 0; i < Words; i += at_once) {
    stream<Kept, at_once>(chunk + i, from + 4 * i);
  }
}

// ------------------------------------------------------------------------------------------------------------------------ order
// Any permutation of a chunk's values works if x has the same. Values of 3, 5 and 6 bits have different positions in both halves
// of a word, but values 15 to 18 bits apart have nearly the same: a window of 32 bits of the chunk, as a ring, has one (with 3
// bits two adjacent ones) in the lowest bits of each half, where `Factors` can multiply them.
template <typename Format>
constexpr bool kWindows = Format::kBiased && (Format::kBits == 3 || Format::kBits == 5 || Format::kBits == 6);
template <typename Format>
constexpr bool kFp4 = !Format::kBiased && Format::kBits == 4;
// How far apart the two values of each pair are in the other formats, as kApart.
template <typename Format>
constexpr int kFactorsApart = kFp4<Format> ? 4 : kApart<Format>;

template <int Bits>
struct Window {
  static constexpr int kLow = Bits == 5 ? 1 : 0;   // the bit of the lower half where its value begins
  static constexpr int kHigh = Bits == 5 ? 0 : 2;  // of the upper half
  static constexpr int kPairs = Bits == 3 ? 2 : 1;
  static constexpr unsigned kMask = ((1u << Bits) - 1) << kLow | ((1u << Bits) - 1) << (16 + kHigh);

  // That of pair i of piece j: values 2 i and 2 i + 3 of the piece or, with 3 bits, 0 and 6, 1 and 7, 4 and 10, 5 and 11.
  template <int Words>
  static __device__ unsigned of(const unsigned (&chunk)[Words], int j, int i) {
    const int value = 8 * j + (Bits == 3 ? i / 2 * 4 : 2 * i);
    const int bit = (value * Bits - kLow + 32 * Words) % (32 * Words);
    const int word = bit / 32;
    return bit % 32 == 0 ? chunk[word] : __funnelshift_r(chunk[word], chunk[(word + 1) % Words], bit % 32);
  }
};

// Of 8 values of x, the two that belong to the piece before, which comes after the last of a chunk.
template <typename Format>
__device__ inline unsigned for_piece_before(const uint4& v) {
  return Format::kBits == 3 ? v.y : v.x;
}

// 8 values of x as the pairs of `Factors`, and the part of the next piece for this one.
template <typename Format>
__device__ inline uint4 order_pairs(const uint4& v, unsigned next) {
  if constexpr (kWindows<Format> && Format::kBits == 3) {
    return make_uint4(
        __byte_perm(v.x, v.w, 0x5410), __byte_perm(v.x, v.w, 0x7632), __byte_perm(v.z, next, 0x5410),
        __byte_perm(v.z, next, 0x7632));
  } else if constexpr (kWindows<Format>) {
    return make_uint4(
        __byte_perm(v.x, v.y, 0x7610), __byte_perm(v.y, v.z, 0x7610), __byte_perm(v.z, v.w, 0x7610),
        __byte_perm(v.w, next, 0x7610));
  } else if constexpr (kFactorsApart<Format> == 2) {
    return make_uint4(
        __byte_perm(v.x, v.y, 0x5410), __byte_perm(v.x, v.y, 0x7632), __byte_perm(v.z, v.w, 0x5410), __byte_perm(v.z, v.w, 0x7632));
  } else if constexpr (kFactorsApart<Format> == 4) {
    return make_uint4(
        __byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632), __byte_perm(v.y, v.w, 0x5410), __byte_perm(v.y, v.w, 0x7632));
  } else {
    return v;
  }
}

// The same by whole warps, four adjacent lanes of which have a chunk.
template <typename Format>
__device__ inline uint4 order_pairs(const uint4& v) {
  unsigned next = 0;
  if constexpr (kWindows<Format>) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    next = __shfl_sync(~0u, for_piece_before<Format>(v), lane / 4 * 4 + (lane + 1) % 4);
  }
  return order_pairs<Format>(v, next);
}

// ---------------------------------------------------------------------------------------------------------------------- weights
// The weights that a tensor core gets, from 8 packed values and the scale of their group.
//
// bfloat16 has a larger exponent than needed. Bits 0 to 7 of a number without others are an integer times 2^-133: those of 128
// and more have an exponent of 1, which has the unit of the subnormal numbers. So integers are multiplied without a shift, by a
// scale with 2^97 in it, and e4m3 by one with 2^84 (the difference of the exponents' biases is 120), and the results are 2^36 too
// small. e2m1 (a difference of 126) has 2^66 and 2^60.
template <typename T>
constexpr bool kRaised = false;
template <>
inline constexpr bool kRaised<__nv_bfloat16> = true;
template <typename Format, typename T>
constexpr float kScaleFactor = kRaised<T> ? (kFp4<Format> ? 0x1p66f : 0x1p84f) : 1.0f;  // of e8m0, and of e4m3
template <typename Format, typename T>
constexpr float kResultFactor = kRaised<T> ? (kFp4<Format> ? 0x1p60f : 0x1p36f) : 1.0f;

// A scale and its bias.
__device__ inline unsigned scaled_word(unsigned word, __nv_bfloat16) {
  return as_bits(__hmul2(as_pair<__nv_bfloat16>(word), as_pair<__nv_bfloat16>(0x2d807000u)));  // 2^97, 2^-36
}
__device__ inline unsigned scaled_word(unsigned word, __half) {
  return word;
}
// Two scales, or two biases.
template <int Biases>
__device__ inline unsigned scaled_pair(unsigned pair, __nv_bfloat16) {
  return as_bits(__hmul2(as_pair<__nv_bfloat16>(pair), as_pair<__nv_bfloat16>(Biases ? 0x2d802d80u : 0x70007000u)));
}
template <int Biases>
__device__ inline unsigned scaled_pair(unsigned pair, __half) {
  return pair;
}

// e2m1 of 4 bits from bit `at` on of both halves: one multiplication puts the sign and the magnitude into position.
__device__ inline unsigned fp4_pair(unsigned word, int at, __nv_bfloat16) {
  return (word & (0x000f000fu << at)) * ((1u << 12 | 1u << 6) >> at) & 0x81c081c0u;  // 2^126 too small
}
// Here the two would overlap.
__device__ inline unsigned fp4_pair(unsigned word, int at, __half) {
  const unsigned bits = (word & (0x00070007u << at)) * ((1u << 9) >> at) + (word & (0x00080008u << at)) * ((1u << 12) >> at);
  return as_bits(__hmul2(as_pair<__half>(bits), as_pair<__half>(0x74007400u)));  // 2^14
}

template <typename Format, typename T>
struct Factors {
  unsigned first;   // the scale twice
  unsigned second;  // the bias twice, or the scale of the second 16 values
  Factors() = default;
  __device__ explicit Factors(unsigned word) : first(__byte_perm(word, 0, 0x1010)), second(__byte_perm(word, 0, 0x3232)) {}

  // Of piece j of a chunk.
  template <int Words>
  __device__ void weights(const unsigned (&chunk)[Words], int j, unsigned (&to)[4]) const {
    constexpr int bits = Format::kBits;
    const uint2 piece = piece_in<bits>(chunk, j);
    if constexpr (kWindows<Format>) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        using In = Window<bits>;
        const int at = i % In::kPairs * bits;
        to[i] = in_window<In>(In::of(chunk, j, i), at);
      }
    } else if constexpr (!Format::kBiased) {
      if constexpr (bits == 4) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          to[i] = fp4_pair(i < 2 ? piece.x : piece.x >> 8, i % 2 * 4, T{});
        }
      } else {
        unpack_fp8(piece.x, to[0], to[1], T{});
        unpack_fp8(piece.y, to[2], to[3], T{});
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (bits == 8 && !kRaised<T>) {
          to[i] = as_bits(__hmul2(as_pair<T>(to[i]), as_pair<T>(0x5c005c00u)));
        }
        to[i] = as_bits(__hmul2(as_pair<T>(to[i]), as_pair<T>(j < 2 ? first : second)));
      }
    } else if constexpr (!kRaised<T>) {
      unpack<Format, T>(piece, to);
      scale_pairs<T>(to, first, second);
    } else if constexpr (bits == 8) {
      to[0] = raised(__byte_perm(piece.x, 0, 0x4140), 0, 0);
      to[1] = raised(__byte_perm(piece.x, 0, 0x4342), 0, 0);
      to[2] = raised(__byte_perm(piece.y, 0, 0x4140), 0, 0);
      to[3] = raised(__byte_perm(piece.y, 0, 0x4342), 0, 0);
    } else {
      constexpr unsigned mask = ((1u << bits) - 1) * 0x10001u;
      constexpr int places = 8 / bits;  // that need no shift
      unsigned half[2];
      split_piece<bits>(piece, half);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // Each half has two pairs; with 2 bits and fewer, the first has all four.
        const unsigned from = places >= 4 ? half[0] : half[i / 2];
        const int at = (places >= 4 ? i : i % 2) * bits;
        to[i] = raised(from & (mask << at), at, at);
      }
    }
  }

 private:
  // Integers at bit `low` of the lower half and `high` of the upper one.
  __device__ unsigned raised(unsigned integers, int low, int high) const {
    const auto less =
        as_pair<T>(static_cast<unsigned>(127 - high) << 23 | static_cast<unsigned>(127 - low) << 7);  // 2^-low, 2^-high
    const auto scale = low == 0 && high == 0 ? as_pair<T>(first) : __hmul2(as_pair<T>(first), less);
    return as_bits(__hfma2(as_pair<T>(integers), scale, as_pair<T>(second)));
  }

  // Integers that are `at` bits above the window's positions.
  template <typename In>
  __device__ unsigned in_window(unsigned window, int at) const {
    const int low = In::kLow + at;
    const int high = In::kHigh + at;
    const unsigned mask = In::kMask << at;
    if constexpr (kRaised<T>) {
      return raised(window & mask, low, high);
    } else {
      // 1024 + 2^low q, and the same times 2^-low less 1024 of it: exact.
      const unsigned based = (window & mask) | kIntegerBase<T>;
      const auto less = as_pair<T>(static_cast<unsigned>(15 - high) << 26 | static_cast<unsigned>(15 - low) << 10);
      const auto base = as_pair<T>(0x80008000u | static_cast<unsigned>(25 - high) << 26 | static_cast<unsigned>(25 - low) << 10);
      return as_bits(__hfma2(__hfma2(as_pair<T>(based), less, base), as_pair<T>(first), as_pair<T>(second)));
    }
  }
};

}  // namespace mlx_cuda
