// Quantized weights as 16-bit numbers, for more rows of x, and for formats other than integers of 4 or 8 bits (operands.cuh). A
// thread's dequantized values of a row of w are its part of the left operand (matmul/quantized/factors.cuh), and x is permuted to
// match.
#pragma once

#include "matmul/gemv/operands.cuh"
#include "matmul/quantized/scales.cuh"

namespace mlx_cuda {

template <typename TypeOf, typename Format, bool Many>
class UnpackedRows {
  using Params = GemvParams;

 public:
  using T = TypeOf;
  static constexpr GemvForm kForm{Format::kBits, 5, !Format::kBiased, Many};
  static constexpr bool kSizeFirst = kShortRange<T>;
  static __device__ constexpr GemvForm form(const Params& p) {
    return {kForm.bits, p.group_shift, kForm.floats, Many};
  }

  __device__ UnpackedRows(const Params& p, const RowMemory& memory)
      : p_(p), memory_(memory), half_scales_(Params::kHalfRows * p.scales_distance(form(p))) {}

  // By whole warps, which have adjacent pieces of 8 values. Those that the four threads of a row read at once are adjacent.
  __device__ void put(int row, int piece, bool there, const uint4& x, bool any, const uint4& norms, float factor) const {
    const uint4 values = order_pairs<Format>(all_normed<T>(x, any, norms, factor));
    if (there) {
      const int in_span = piece % (4 * kPieces);
      const int place = piece - in_span + in_span % kPieces * 4 + in_span / kPieces;
      reinterpret_cast<uint4*>(memory_.x + row * p_.x_distance(form(p_)))[place] = values;
    }
  }

  __device__ void find_columns(int group, int member) {
    const bool mine = group < p_.rows;
    x_ = mine ? memory_.x + group * p_.x_distance(form(p_)) + member * 16 : memory_.zeros;
    step_ = mine ? kForm.span_values() * 2 : 0;
    member_ = member;
    group_ = group;
  }

  // Both: the tile has rows in its second half. `scales`: of the thread's first row and the unit; biases are `to_biases` on.
  template <bool Both>
  __device__ void multiply(const unsigned char* w, const unsigned char* scales, int to_biases, int unit) {
    constexpr int halves = Both ? 2 : 1;
#pragma unroll
    for (int span = 0; span < 2; ++span) {
      unsigned chunks[2][kWords];
      Factors<Format, T> factors[2];
      const int scale_at = (span * kForm.span_values() + member_ * kChunk<Format> >> p_.group_shift) * kForm.scale_bytes();
#pragma unroll
      for (int half = 0; half < halves; ++half) {
        load(chunks[half], w, group_ + half * Params::kHalfRows, span);
        note_nans<Format>(nans_[half], chunks[half]);
        const unsigned char* from = scales + half * half_scales_ + scale_at;
        unsigned scale = *from;
        if constexpr (kForm.scale_bytes() == 2 || kTwoScales<Format>) {
          scale = *reinterpret_cast<const unsigned short*>(from);
        }
        if constexpr (Format::kBiased) {
          scale |= static_cast<unsigned>(*reinterpret_cast<const unsigned short*>(from + to_biases)) << 16;
        }
        factors[half] = Factors<Format, T>(scale_word<Format, T>(scale));
      }
      const unsigned char* x = x_ + (unit * 2 + span) * step_;
#pragma unroll
      for (int j = 0; j < kPieces; ++j) {
        unsigned weights[2][4] = {};
#pragma unroll
        for (int half = 0; half < halves; ++half) {
          factors[half].weights(chunks[half], j, weights[half]);
        }
        const auto& [low, high] = weights;
        const uint4 v = *reinterpret_cast<const uint4*>(x + j * 64);
        mma(totals_, make_uint4(low[0], high[0], low[1], high[1]), v.x, v.y, T{});
        mma(totals_, make_uint4(low[2], high[2], low[3], high[3]), v.z, v.w, T{});
      }
    }
  }

  template <typename Put>
  __device__ void give(const Put& put) {
    share_nans<Format>(nans_);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      put(i / 2, member_ * 2 + i % 2, result_or_nan<Format>(totals_[i] * kResultFactor<Format, T>, nans_[i / 2]));
      totals_[i] = 0.0f;
    }
    nans_[0] = nans_[1] = 0;
  }

 private:
  static constexpr int kPieces = kChunk<Format> / 8;  // of 8 values, that a thread has of a row and span
  static constexpr int kWords = kPieces * kForm.bits / 4;
  static_assert(kForm.span_values() == 4 * kChunk<Format>);

  // A thread's part of a row and span.
  __device__ void load(unsigned (&chunk)[kWords], const unsigned char* w, int row, int span) const {
    if constexpr (kForm.unit_bytes() == 128) {
      load_words<16>(chunk, w + ring_place<kForm.bits>(row, span * 4 + member_));
    } else {
      constexpr int at_once = kWords % 2 == 0 ? 2 : 1;
#pragma unroll
      for (int i = 0; i < kWords; i += at_once) {
        load_words<at_once * 4>(chunk + i, w + row * kForm.ring_bytes() + ((span * 4 + member_) * kWords + i) * 4);
      }
    }
  }

  const Params& p_;
  const RowMemory memory_;
  const int half_scales_;  // bytes from a row's scales to those of the row 8 below
  const unsigned char* x_;
  int step_;  // bytes from span to span
  int group_;
  int member_;
  float totals_[4] = {};  // rows g and g + 8, of two columns each
  unsigned nans_[2] = {};
};

}  // namespace mlx_cuda
