// MLX's quantized formats: 8 packed values to floats.
//
// A row is a stream of `kBits` bits per value, the lowest bits first. A piece is 8 values: 8 kBits bits at the start of two
// words.
#pragma once

#include "device/mma.cuh"
#include "device/ptx.cuh"
#include "device/vector.cuh"

namespace mlx_cuda {

template <int Bits>
struct Affine {
  static constexpr int kBits = Bits;
  static constexpr bool kBiased = true;
};
struct Mxfp4 {
  static constexpr int kBits = 4;
  static constexpr bool kBiased = false;
};
struct Mxfp8 {
  static constexpr int kBits = 8;
  static constexpr bool kBiased = false;
};
struct Nvfp4 {
  static constexpr int kBits = 4;
  static constexpr bool kBiased = false;
};

// By their names in tables of kernels.
namespace formats {
using affine2 = Affine<2>;
using affine3 = Affine<3>;
using affine4 = Affine<4>;
using affine5 = Affine<5>;
using affine6 = Affine<6>;
using affine8 = Affine<8>;
using mxfp4 = Mxfp4;
using mxfp8 = Mxfp8;
using nvfp4 = Nvfp4;
}  // namespace formats

// Piece j of adjacent words.
template <int Bits, int Words>
__device__ inline uint2 piece_in(const unsigned (&words)[Words], int j) {
  auto from_bit = [&](int bit) {
    const int word = bit / 32;
    const int next = word + 1 < Words ? word + 1 : word;
    return bit % 32 == 0 ? words[word] : __funnelshift_r(words[word], words[next], bit % 32);
  };
  const int bit = j * 8 * Bits;
  return make_uint2(from_bit(bit), Bits > 4 ? from_bit(bit + 32) : 0);
}

// How far apart the two values of each pair that `unpack` gives are: 1 (0 1, 2 3, ...), 2 (0 2, 1 3, ...) or 4 (0 4, 1 5, ...).
template <typename Format>
constexpr int kApart = Format::kBiased ? (Format::kBits == 8 ? 1 : 4) : (Format::kBits == 8 ? 2 : 1);

template <typename T>
struct PairOf;
template <>
struct PairOf<__half> {
  using type = __half2;
};
template <>
struct PairOf<__nv_bfloat16> {
  using type = __nv_bfloat162;
};
template <typename T>
using Pair = typename PairOf<T>::type;

template <typename T>
__device__ inline Pair<T> as_pair(unsigned bits) {
  return *reinterpret_cast<Pair<T>*>(&bits);
}
template <typename P>
__device__ inline unsigned as_bits(P pair) {
  return *reinterpret_cast<unsigned*>(&pair);
}
// ------------------------------------------------------------------------------------------------------- integers with a bias
// An integer put into the low bits of the right power of two is that power plus the integer: no conversion is needed.
template <typename T>
constexpr unsigned kIntegerBase = 0;
template <>
constexpr unsigned kIntegerBase<__half> = 0x64006400u;  // 1024
template <>
constexpr unsigned kIntegerBase<__nv_bfloat16> = 0x43004300u;  // 128

// Values 0 to 3 from bit 0 and 4 to 7 from bit 16 on; where these are too long, the last two of each apart.
template <int Bits>
__device__ inline void split_piece(uint2 piece, unsigned (&half)[2]) {
  if constexpr (Bits <= 4) {
    half[0] = Bits == 4 ? piece.x : (piece.x & 0xffffu) | ((piece.x << (16 - 4 * Bits)) & 0xffff0000u);
    half[1] = half[0] >> (2 * Bits);
  } else {
    const unsigned later = __funnelshift_r(piece.x, piece.y, 4 * Bits);
    half[0] = __byte_perm(piece.x, later, 0x5410);
    half[1] = __byte_perm(piece.x >> (2 * Bits), later >> (2 * Bits), 0x5410);
  }
}

template <int Bits, typename T>
__device__ inline void unpack_integers(uint2 piece, unsigned (&pairs)[4]) {
  constexpr unsigned mask = ((1u << Bits) - 1) * 0x10001u;
  unsigned half[2];
  split_piece<Bits>(piece, half);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned raised = raise<mask, kIntegerBase<T>>(half[i / 2] >> (i % 2 * Bits));
    pairs[i] = as_bits(__hsub2(as_pair<T>(raised), as_pair<T>(kIntegerBase<T>)));
  }
}

template <typename T>
__device__ inline void unpack_bytes(unsigned word, unsigned& first, unsigned& second, T);
template <>
__device__ inline void unpack_bytes(unsigned word, unsigned& first, unsigned& second, __half) {
  const __half2 base = as_pair<__half>(0x64006400u);
  first = as_bits(__hsub2(as_pair<__half>(__byte_perm(word, 0x64646464u, 0x4140)), base));
  second = as_bits(__hsub2(as_pair<__half>(__byte_perm(word, 0x64646464u, 0x4342)), base));
}
// bfloat16 has 7 bits below the leading one: the eighth falls into the exponent, and 128 + q becomes 2 q from 128 on.
__device__ inline unsigned from_raised_byte(unsigned raised) {
  const __nv_bfloat162 f = as_pair<__nv_bfloat16>(raised);
  const __nv_bfloat162 below = __hsub2(f, as_pair<__nv_bfloat16>(0x43004300u));
  const __nv_bfloat162 above = __hmul2(f, as_pair<__nv_bfloat16>(0x3f003f00u));
  return as_bits(__hmin2(below, above));
}
template <>
__device__ inline void unpack_bytes(unsigned word, unsigned& first, unsigned& second, __nv_bfloat16) {
  first = from_raised_byte(__byte_perm(word, 0x43434343u, 0x4140));
  second = from_raised_byte(__byte_perm(word, 0x43434343u, 0x4342));
}

// ------------------------------------------------------------------------------------------------------------- small floats
// Both look the bytes of the magnitudes up with a byte permutation, whose selector takes three bits of each value.
__device__ inline void unpack_fp4(unsigned word, unsigned (&pairs)[4], __nv_bfloat16) {
  const unsigned select = word & 0x77777777u;
  const unsigned shifted = word << 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const unsigned s = select >> (16 * i);
    const unsigned low = __byte_perm(0xc0800000u, 0xc0804000u, s);
    const unsigned sign = __byte_perm(shifted, word, i == 0 ? 0xd9c8 : 0xfbea);  // bytes of the sign bit
    const unsigned high = __byte_perm(0x3f3f3f00u, 0x40404040u, s) | (sign & 0x80808080u);
    pairs[2 * i] = __byte_perm(low, high, 0x5140);
    pairs[2 * i + 1] = __byte_perm(low, high, 0x7362);
  }
}
__device__ inline void unpack_fp4(unsigned word, unsigned (&pairs)[4], __half) {
  const unsigned select = word & 0x77777777u;
  const unsigned shifted = word << 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const unsigned sign = __byte_perm(shifted, word, i == 0 ? 0xd9c8 : 0xfbea);
    const unsigned high = __byte_perm(0x3e3c3800u, 0x46444240u, select >> (16 * i)) | (sign & 0x80808080u);
    pairs[2 * i] = __byte_perm(high, 0, 0x1404);
    pairs[2 * i + 1] = __byte_perm(high, 0, 0x3424);
  }
}

// e4m3: its bits moved to where the exponent and the mantissa are, 2^8 (float16) or 2^120 (bfloat16) too small. The first pair are
// the even bytes.
__device__ inline void unpack_fp8(unsigned word, unsigned& first, unsigned& second, __half) {
  first = (word << 8 & 0x80008000u) | (word << 7 & 0x3f803f80u);
  second = (word & 0x80008000u) | (word >> 1 & 0x3f803f80u);
}
__device__ inline void unpack_fp8(unsigned word, unsigned& first, unsigned& second, __nv_bfloat16) {
  first = (word << 8 & 0x80008000u) | (word << 4 & 0x07f007f0u);
  second = (word & 0x80008000u) | (word >> 4 & 0x07f007f0u);
}
// Not 0 where a byte of the word is one of e4m3's two NaN, which unpack_fp8 takes for 480.
__device__ inline unsigned fp8_nans(unsigned word) {
  return ((word & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
}

// 8 integers without their scale.
template <typename Format, typename T>
__device__ inline void unpack(uint2 piece, unsigned (&pairs)[4]) {
  if constexpr (Format::kBits == 8) {
    unpack_bytes(piece.x, pairs[0], pairs[1], T{});
    unpack_bytes(piece.y, pairs[2], pairs[3], T{});
  } else {
    unpack_integers<Format::kBits, T>(piece, pairs);
  }
}

// Values times their scale plus their bias, two at a time, as MLX computes them in T: one multiplication and one addition.
template <typename T>
__device__ inline void scale_pairs(unsigned (&pairs)[4], unsigned scale, unsigned bias) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    pairs[i] = as_bits(__hfma2(as_pair<T>(pairs[i]), as_pair<T>(scale), as_pair<T>(bias)));
  }
}

// ------------------------------------------------------------------------------------------------------------------- as float32
__device__ inline float from_e8m0(unsigned bits) {
  return __uint_as_float(bits == 0 ? 0x00400000u : bits == 255 ? 0x7fc00000u : bits << 23);
}
__device__ inline float from_e4m3(unsigned bits) {
  const float value = __uint_as_float((bits & 0x80) << 24 | (bits & 0x7f) << 20) * __uint_as_float(0x7b800000u);
  return (bits & 0x7f) == 0x7f ? __uint_as_float(0x7fc00000u) : value;
}
__device__ inline float from_e2m1(unsigned bits) {
  return __uint_as_float((bits & 8) << 28 | (bits & 7) << 22) * __uint_as_float(0x7e800000u);
}

template <typename Format>
__device__ inline void unpack(uint2 piece, float (&values)[8]) {
  constexpr int bits = Format::kBits;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const unsigned shifted = i * bits >= 32         ? piece.y >> (i * bits - 32)
                             : i * bits + bits > 32 ? __funnelshift_r(piece.x, piece.y, i * bits)
                                                    : piece.x >> (i * bits);
    const unsigned value = shifted & ((1u << bits) - 1);
    if constexpr (Format::kBiased) {
      values[i] = __uint_as_float(value | 0x4b000000u) - __uint_as_float(0x4b000000u);
    } else if constexpr (bits == 4) {
      values[i] = from_e2m1(value);
    } else {
      values[i] = from_e4m3(value);
    }
  }
}

// ----------------------------------------------------------------------------------------------------------------------- scales
__device__ inline float scale_from(unsigned char bits, Nvfp4) {
  return from_e4m3(bits);
}
template <typename Format>
__device__ inline float scale_from(unsigned char bits, Format) {
  return from_e8m0(bits);
}

// --------------------------------------------------------------------------------------------------------- pieces in global memory
// The 8 values of piece `i` of a row; they begin on a byte and reach into the next word at most.
template <typename Format>
__device__ inline uint2 load_piece(const unsigned* w, long long i) {
  constexpr int bits = Format::kBits;
  if constexpr (bits == 8) {
    return __ldg(reinterpret_cast<const uint2*>(w) + i);
  } else if constexpr (bits == 4) {
    return make_uint2(__ldg(w + i), 0);
  } else {
    const long long bit = i * (8 * bits);
    const unsigned* at = w + bit / 32;
    const int shift = bit % 32;
    const unsigned low = __ldg(at);
    const unsigned high = shift + 8 * bits > 32 ? __ldg(at + 1) : 0;
    return make_uint2(__funnelshift_r(low, high, shift), high >> shift);
  }
}

// --------------------------------------------------------------------------------------------------- words through shared memory
template <int Bytes>
__device__ inline void load_words(unsigned* to, const void* from) {
  if constexpr (Bytes == 16) {
    const uint4 v = *static_cast<const uint4*>(from);
    to[0] = v.x;
    to[1] = v.y;
    to[2] = v.z;
    to[3] = v.w;
  } else if constexpr (Bytes == 8) {
    const uint2 v = *static_cast<const uint2*>(from);
    to[0] = v.x;
    to[1] = v.y;
  } else {
    to[0] = *static_cast<const unsigned*>(from);
  }
}

// ------------------------------------------------------------------------------------------------------------------------ values
// 8 values of a group, in order; those with a bias are rounded to T.
template <typename Format, typename T>
__device__ inline void dequantize_piece(uint2 piece, const void* scales, const void* biases, long long group, float (&values)[8]) {
  if constexpr (Format::kBiased && sizeof(T) == 2) {
    unsigned pairs[4];
    unpack<Format, T>(piece, pairs);
    const unsigned scale = static_cast<const unsigned short*>(scales)[group] * 0x10001u;
    const unsigned bias = static_cast<const unsigned short*>(biases)[group] * 0x10001u;
    scale_pairs<T>(pairs, scale, bias);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 two = mlx_cuda::unpack(pairs[i], T{});
      values[kApart<Format> == 1 ? 2 * i : i] = two.x;
      values[kApart<Format> == 1 ? 2 * i + 1 : i + 4] = two.y;
    }
  } else {
    unpack<Format>(piece, values);
    if constexpr (Format::kBiased) {
      const float scale = static_cast<const float*>(scales)[group];
      const float bias = static_cast<const float*>(biases)[group];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        values[i] = fmaf(values[i], scale, bias);
      }
    } else {
      const float scale = scale_from(static_cast<const unsigned char*>(scales)[group], Format{});
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        values[i] *= scale;
      }
    }
  }
}

}  // namespace mlx_cuda
