// Packed values on their way to the tensor cores: read from memory, and times their scales.
#pragma once

#include "kernels/quantized.cuh"

namespace mlx_cuda {

__device__ inline uint4 stream16(const void* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}
__device__ inline uint2 stream8(const void* from) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from));
  return v;
}
__device__ inline unsigned stream4(const void* from) {
  unsigned v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.u32 %0, [%1];" : "=r"(v) : "l"(from));
  return v;
}

template <int Words>
__device__ inline void load_chunk(unsigned (&chunk)[Words], const char* from) {
  if constexpr (Words % 4 == 0) {
#pragma unroll
    for (int i = 0; i < Words; i += 4) {
      const uint4 v = stream16(from + 4 * i);
      chunk[i] = v.x;
      chunk[i + 1] = v.y;
      chunk[i + 2] = v.z;
      chunk[i + 3] = v.w;
    }
  } else if constexpr (Words % 2 == 0) {
#pragma unroll
    for (int i = 0; i < Words; i += 2) {
      const uint2 v = stream8(from + 4 * i);
      chunk[i] = v.x;
      chunk[i + 1] = v.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < Words; ++i) {
      chunk[i] = stream4(from + 4 * i);
    }
  }
}

// The weights that a tensor core gets, from 8 packed values and the scale of their group.
//
// bfloat16 has room to spare in its exponent. Bits 0 to 7 of a number that has no others are an integer times 2^-133: those of 128
// and more have an exponent of 1, which has the unit of the subnormal numbers. So integers are multiplied where they lie, by a
// scale with 2^97 in it, and e4m3 by one with 2^84 (the difference of the exponents' biases is 120), and the results are 2^36 too
// small. e2m1 (a difference of 126) has 2^66 and 2^60.
template <typename T>
constexpr bool kRaised = false;
template <>
inline constexpr bool kRaised<__nv_bfloat16> = true;
template <typename Format>
constexpr bool kFp4 = !Format::kBiased && Format::kBits == 4;
template <typename Format, typename T>
constexpr float kScaleFactor = kRaised<T> ? (kFp4<Format> ? 0x1p66f : 0x1p84f) : 1.0f;  // of e8m0, and of e4m3
template <typename Format, typename T>
constexpr float kResultFactor = kRaised<T> ? (kFp4<Format> ? 0x1p60f : 0x1p36f) : 1.0f;

// How far apart the two values of each pair are here, as kApart.
template <typename Format>
constexpr int kFactorsApart = kFp4<Format> ? 4 : kApart<Format>;

// A scale and its bias.
__device__ inline unsigned scaled_word(unsigned word, __nv_bfloat16) {
  return as_bits(__hmul2(as_pair<__nv_bfloat16>(word), as_pair<__nv_bfloat16>(0x2d807000u)));  // 2^97, 2^-36
}
__device__ inline unsigned scaled_word(unsigned word, __half) {
  return word;
}

// e2m1 of 4 bits from bit `at` on of both halves: a product puts the sign and the magnitude where they belong at once.
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
  __device__ void weights(uint2 piece, int j, unsigned (&to)[4]) const {
    constexpr int bits = Format::kBits;
    if constexpr (!Format::kBiased) {
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
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        to[i] = as_bits(__hfma2(as_pair<T>(to[i]), as_pair<T>(first), as_pair<T>(second)));
      }
    } else if constexpr (bits == 8) {
      to[0] = raised(__byte_perm(piece.x, 0, 0x4140), 0);
      to[1] = raised(__byte_perm(piece.x, 0, 0x4342), 0);
      to[2] = raised(__byte_perm(piece.y, 0, 0x4140), 0);
      to[3] = raised(__byte_perm(piece.y, 0, 0x4342), 0);
    } else {
      constexpr unsigned mask = ((1u << bits) - 1) * 0x10001u;
      constexpr int places = 8 / bits;  // that need no shift
      unsigned half[2];
      split_piece<bits>(piece, half);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // Two pairs lie in each half; with 2 bits and fewer all four in the first.
        const unsigned from = places >= 4 ? half[0] : half[i / 2];
        const int at = (places >= 4 ? i : i % 2) * bits;
        const bool in_place = at + bits <= 8;
        to[i] = in_place ? raised(from & (mask << at), at) : raised((from >> at) & mask, 0);
      }
    }
  }

 private:
  // Integers at bit `at` of both halves.
  __device__ unsigned raised(unsigned integers, int at) const {
    const unsigned less = static_cast<unsigned>(127 - at) << 7;  // 2^-at
    const auto scale = at == 0 ? as_pair<T>(first) : __hmul2(as_pair<T>(first), as_pair<T>(less * 0x10001u));
    return as_bits(__hfma2(as_pair<T>(integers), scale, as_pair<T>(second)));
  }
};

}  // namespace mlx_cuda
