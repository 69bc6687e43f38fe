// Packed weights on their way through shared memory to the threads of a warp that unpack them (quantized_sm90.cu): 16 rows of w,
// part by part, in `Depth` stages.
#pragma once

#include "device/ptx.cuh"
#include "matmul/quantized/params.h"
#include "matmul/quantized/scales.cuh"

namespace mlx_cuda {

// A thread's part of a row and part.
template <typename Format>
struct ThreadPart {
  static constexpr int kChunks = QuantizedSm90::kPart / 4 / kChunk<Format>;
  static constexpr int kWords = kChunk<Format> * Format::kBits / 32;             // of a chunk
  static constexpr int kBytes = kWords % 4 == 0 ? 16 : kWords % 2 == 0 ? 8 : 4;  // copied or read at once
  using Rows = unsigned[2][kChunks][kWords];                                     // of rows lane / 4 and lane / 4 + 8
};

// The slots of parts, one after the other.
template <typename Format, int Depth>
class Slots {
  static constexpr int kBytes = QuantizedSm90::slot_bytes(Format::kBits);

 public:
  __device__ int operator*() const {
    return at_;
  }
  __device__ void advance() {
    at_ = at_ == (Depth - 1) * kBytes ? 0 : at_ + kBytes;
  }

 private:
  int at_ = 0;
};

// Each thread loads its own chunks, and waits for no other.
template <typename Format, int Depth>
class OwnChunks {
  using Part = ThreadPart<Format>;
  static constexpr int kStride = QuantizedSm90::kConsumers * 128 * Part::kBytes;  // from one vector of a thread to the next

 public:
  __device__ OwnChunks(const QuantizedSm90Params& p, const char* w, int first, int there, unsigned char* slots)
      : mine_(slots + (static_cast<int>(threadIdx.x) - 128) * Part::kBytes), there_(there) {
    // Rows after the last are the last again: what comes of them is not written.
    const int row = first + static_cast<int>(threadIdx.x) % 32 / 4;
    rows_[0] = w + min(row, p.columns - 1) * p.row_bytes;
    rows_[1] = w + min(row + 8, p.columns - 1) * p.row_bytes;
  }

  // Loads the next part, if there is one, into the stage of the one `Depth` before.
  __device__ void copy_next() {
    if (next_ < there_) {
      unsigned to = shared_address(mine_) + *to_;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int c = 0; c < Part::kChunks; ++c) {
          // Out of bounds, the scales or x are zero.
          const int chunk = c * 4 + static_cast<int>(threadIdx.x) % 4;
          const unsigned value = min(next_ + chunk * kChunk<Format>, there_ - kChunk<Format>);
          const char* from = rows_[r] + value / 8 * Format::kBits;
#pragma unroll
          for (int i = 0; i < Part::kWords * 4; i += Part::kBytes) {
            copy_async<Part::kBytes>(to, from + i);
            to += kStride;
          }
        }
      }
    }
    commit_copies();
    next_ += QuantizedSm90::kPart;
    to_.advance();
  }

  // The next part, with `Depth` - 1 copies under way.
  __device__ void read_next(typename Part::Rows& part) {
    wait_copies<Depth - 2>();
    const unsigned char* from = mine_ + *from_;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int c = 0; c < Part::kChunks; ++c) {
#pragma unroll
        for (int i = 0; i < Part::kWords; i += Part::kBytes / 4) {
          load_words<Part::kBytes>(part[r][c] + i, from);
          from += kStride;
        }
      }
    }
    from_.advance();
  }

 private:
  unsigned char* mine_;
  const char* rows_[2];
  int there_;
  int next_ = 0;  // the first value of the part that is copied next
  Slots<Format, Depth> to_;
  Slots<Format, Depth> from_;
};

// A warp copies whole pieces of 16 bytes, where a chunk is no such piece.
template <typename Format, int Depth>
class WarpPieces {
  using Part = ThreadPart<Format>;
  static constexpr int kPieces = Format::kBits;             // of a row and part
  static constexpr int kRowBytes = kPieces * 16;            // of biases too
  static constexpr int kCopies = (16 * kPieces + 31) / 32;  // of each lane
  static_assert(Part::kChunks == 1);

 public:
  __device__ WarpPieces(const QuantizedSm90Params& p, const char* w, int first, int there, unsigned char* slots)
      : slots_(slots + (static_cast<int>(threadIdx.x) / 32 - 4) * (16 * kRowBytes)),
        w_(w),
        first_(first),
        last_(p.columns - 1),
        row_bytes_(p.row_bytes),
        bytes_(there / 8 * Format::kBits),
        whole_((reinterpret_cast<unsigned long long>(w) | row_bytes_ | bytes_) % 16 == 0) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      rows_[i] = row((lane() + 32 * i) / kPieces);
    }
  }

  // Loads the next part, if there is one, into the stage of the one `Depth` before, which all lanes have read.
  __device__ void copy_next() {
    if (next_ < bytes_) {
      copy(shared_address(slots_) + *to_);
    }
    commit_copies();
    next_ += kRowBytes;
    to_.advance();
  }

  // The next part, with `Depth` - 1 copies under way.
  __device__ void read_next(typename Part::Rows& part) {
    wait_copies<Depth - 2>();
    __syncwarp();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const unsigned char* from = slots_ + *from_ + (lane() / 4 + 8 * r) * kRowBytes + lane() % 4 * (Part::kWords * 4);
#pragma unroll
      for (int i = 0; i < Part::kWords; i += Part::kBytes / 4) {
        load_words<Part::kBytes>(part[r][0] + i, from + i * 4);
      }
    }
    from_.advance();
  }

 private:
  static __device__ int lane() {
    return static_cast<int>(threadIdx.x) % 32;
  }
  // Rows after the last are the last again: what comes of them is not written.
  __device__ const char* row(int i) const {
    return w_ + min(first_ + i, last_) * row_bytes_;
  }

  // Out of bounds, the scales or x are zero.
  __device__ void copy(unsigned to) const {
    if (whole_) {
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const int piece = lane() + 32 * i;
        if (32 * i + 32 <= 16 * kPieces || piece < 16 * kPieces) {
          copy_async<16>(to + piece * 16, rows_[i] + min(next_ + piece % kPieces * 16, bytes_ - 16));
        }
      }
    } else {
#pragma unroll 1
      for (int word = lane(); word < 16 * kPieces * 4; word += 32) {
        const char* from = row(word / (kPieces * 4));
        copy_async<4>(to + word * 4, from + min(next_ + word % (kPieces * 4) * 4, bytes_ - 4));
      }
    }
  }

  unsigned char* slots_;
  const char* w_;
  const char* rows_[kCopies];
  int first_;
  int last_;
  long long row_bytes_;
  int bytes_;     // of a row
  bool whole_;    // whether rows are whole pieces
  int next_ = 0;  // of a row's bytes, the first of the part that is copied next
  Slots<Format, Depth> to_;
  Slots<Format, Depth> from_;
};

template <bool Windows, typename Format, int Depth>
struct PackedRowsOf {
  using type = OwnChunks<Format, Depth>;
};
template <typename Format, int Depth>
struct PackedRowsOf<true, Format, Depth> {
  using type = WarpPieces<Format, Depth>;
};
template <typename Format, int Depth>
using PackedRows = typename PackedRowsOf<kWindows<Format>, Format, Depth>::type;

}  // namespace mlx_cuda
