// Common parts of small-M GEMMs with quantized weights: chunks of packed values, the layout of x for them, and the scales of rows
// of w.
#pragma once

#include "matmul/quantized/factors.cuh"

namespace mlx_cuda {

template <typename Format>
constexpr bool kFp8 = !Format::kBiased && Format::kBits == 8;
template <typename Format>
constexpr bool kTwoScales = false;  // in a chunk
template <>
inline constexpr bool kTwoScales<Nvfp4> = true;

// Adjacent values that a thread has of a row in a step: 32, or as many as four words hold.
template <typename Format>
[[maybe_unused]] constexpr int kChunk = Format::kBits == 8 ? 16 : 32;

// The position of the 8 values `piece` (0 to 15) of 128 of a row of x: without bank conflicts between the lanes of a warp.
template <typename Format>
__device__ inline int x_place(int row, int piece) {
  constexpr int pieces = kChunk<Format> / 8;  // of a chunk
  const int thread = piece / pieces % 4;
  const int turn = piece / (4 * pieces) * pieces + piece % pieces;
  return row * 256 + ((turn ^ (row & 1)) * 4 + thread) * 16;
}

// The stored scales of one row and slice, up to 16 bytes each.
struct RowScales {
  unsigned scale[4];
  unsigned bias[4];
};

// `bytes` (4, 8 or 16) of which the first `there` are there; zeros after them.
template <int Unit>
__device__ inline void load_scales(unsigned (&to)[4], const char* from, int bytes, int there, bool wide) {
  if (wide && there >= bytes) {
    if (bytes == 16) {
      const uint4 v = __ldg(reinterpret_cast<const uint4*>(from));
      to[0] = v.x;
      to[1] = v.y;
      to[2] = v.z;
      to[3] = v.w;
    } else if (bytes == 8) {
      const uint2 v = __ldg(reinterpret_cast<const uint2*>(from));
      to[0] = v.x;
      to[1] = v.y;
    } else {
      to[0] = __ldg(reinterpret_cast<const unsigned*>(from));
    }
    return;
  }
#pragma unroll 1
  for (int i = 0; i < 16; i += 4) {
    unsigned word = 0;
#pragma unroll
    for (int j = 0; j < 4; j += Unit) {
      if (i + j < there) {
        word |= (Unit == 2 ? __ldg(reinterpret_cast<const unsigned short*>(from + i + j))
                           : __ldg(reinterpret_cast<const unsigned char*>(from + i + j)))
                << (8 * j);
      }
    }
    to[0] = to[1];
    to[1] = to[2];
    to[2] = to[3];
    to[3] = word;
  }
}

// The factors of a chunk as a word, of the scale and bias, or one or two scales, as stored in `packed`.
template <typename Format, typename T>
__device__ inline unsigned scale_word(unsigned packed) {
  if constexpr (Format::kBiased) {
    return scaled_word(packed, T{});
  } else {
    constexpr float factor = kScaleFactor<Format, T>;
    const float first = scale_from(packed & 0xff, Format{}) * factor;
    return pack(first, kTwoScales<Format> ? scale_from(packed >> 8 & 0xff, Format{}) * factor : first, T{});
  }
}

// As words in shared memory.
template <typename Format, typename T>
__device__ inline void store_scales(unsigned* to, const RowScales& row) {
  unsigned words[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if constexpr (Format::kBiased) {
      words[i] = scale_word<Format, T>(__byte_perm(row.scale[i / 2], row.bias[i / 2], i % 2 == 0 ? 0x5410 : 0x7632));
    } else {
      constexpr int each = kTwoScales<Format> ? 2 : 4;  // of a word
      words[i] = scale_word<Format, T>(row.scale[i / each] >> (i % each * (32 / each)));
    }
  }
  reinterpret_cast<uint4*>(to)[0] = make_uint4(words[0], words[1], words[2], words[3]);
  reinterpret_cast<uint4*>(to)[1] = make_uint4(words[4], words[5], words[6], words[7]);
}

// ------------------------------------------------------------------------------------------------------------------- NaN of e4m3
// What unpack_fp8 takes for numbers makes a row's results NaN at the end. `nans`: not 0 where a row has one.
template <typename Format, int Words>
__device__ inline void note_nans(unsigned& nans, const unsigned (&chunk)[Words]) {
  if constexpr (kFp8<Format>) {
#pragma unroll
    for (int i = 0; i < Words; ++i) {
      nans |= fp8_nans(chunk[i]);
    }
  }
}

// Of each row, those of the four threads that share it.
template <typename Format, int Rows>
__device__ inline void share_nans(unsigned (&nans)[Rows]) {
  if constexpr (kFp8<Format>) {
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      nans[r] |= __shfl_xor_sync(~0u, nans[r], 1);
      nans[r] |= __shfl_xor_sync(~0u, nans[r], 2);
    }
  }
}

template <typename Format>
__device__ inline float result_or_nan(float result, unsigned nans) {
  return kFp8<Format> && nans ? __uint_as_float(0x7fc00000u) : result;
}

}  // namespace mlx_cuda
