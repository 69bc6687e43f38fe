// Tiles of chunks of tokens in shared memory, as MMA operands.
#pragma once

#include "device/mma.cuh"
#include "device/numbers.cuh"
#include "device/ptx.cuh"
#include "recurrence/chunked_params.h"
#include "recurrence/rows.cuh"

namespace mlx_cuda {

// Elements from row to row of tiles in shared memory.
constexpr int kPitch = kChunkKeys + kPad;   // of keys
constexpr int kSquare = kChunk + kPad;      // of tokens
constexpr int kThin = kScanColumns + kPad;  // of the values in a scan

constexpr int kStateRows = kChunkKeys / 4;  // of a head's state, transposed, for each warp of a scan
constexpr int kStateBlocks = kStateRows / 16;

constexpr float kLeastLogDecay = -29.933606f;  // of one token, of 1e-13: 16 bits cannot represent more

template <typename T>
__device__ inline void write_pair(T* to, float a, float b) {
  *reinterpret_cast<unsigned*>(to) = pack(a, b, T{});
}

// Operand tiles of 16 by 16 elements of 16 bits in shared memory, with `pitch` elements from row to row: as stored, or
// transposed. Left operands have four 8 by 8 matrices, down the rows first; right ones have them along K first.
template <typename T>
__device__ inline uint4 left(const T* tile, int pitch) {
  const int lane = threadIdx.x % 32;
  return load_matrices(shared_address(tile + lane % 16 * pitch + lane / 16 * 8));
}
template <typename T>
__device__ inline uint4 left_transposed(const T* tile, int pitch) {
  const int lane = threadIdx.x % 32;
  return load_matrices_transposed(shared_address(tile + (lane % 8 + lane / 16 * 8) * pitch + lane / 8 % 2 * 8));
}
// For two tiles of 8 columns, which are rows here.
template <typename T>
__device__ inline uint4 right(const T* tile, int pitch) {
  const int lane = threadIdx.x % 32;
  return load_matrices(shared_address(tile + (lane % 8 + lane / 16 * 8) * pitch + lane / 8 % 2 * 8));
}
template <typename T>
__device__ inline uint4 right_transposed(const T* tile, int pitch) {
  const int lane = threadIdx.x % 32;
  return load_matrices_transposed(shared_address(tile + lane % 16 * pitch + lane / 16 * 8));
}

// The MMA with two tiles of 8 columns.
template <typename T>
__device__ inline void mma(float (&sums)[2][4], const uint4& rows, const uint4& columns, T type) {
  mma(sums[0], rows, columns.x, columns.y, type);
  mma(sums[1], rows, columns.z, columns.w, type);
}

// Rows of a chunk, of so many elements of a head, into shared memory; zeros for tokens that are not there and elements that a head
// does not have.
template <typename T, int Columns, int Threads = kChunkThreads>
__device__ inline void load_rows(
    T* to, const Recurrence& p, const Work& work, const Operand& from, int head, int first, int first_element, int elements) {
  constexpr int kUnits = Columns / 8;
  constexpr int kRows = Threads / kUnits;  // at once
  constexpr int kApart = kRows * (Columns + kPad) * 2;
  const int element = threadIdx.x % kUnits * 8;
  const int row = threadIdx.x / kUnits;
  const bool within = first_element + element < elements;
  const T* source = static_cast<const T*>(from.data);
  source += within ? place(from, work.batch, first + row, head) + first_element + element : 0;
  const long long step = within ? kRows * from.token : 0;
  const unsigned target = shared_address(to + row * (Columns + kPad) + element);
  if (!p.mask && first + kChunk <= work.end) [[likely]] {  // a scan waits for these instructions
#pragma unroll
    for (int i = 0; i < kChunk / kRows; ++i) {
      copy16_async(target + i * kApart, source, within);
      source += step;
    }
    return;
  }
#pragma unroll 1
  for (int i = 0; i < kChunk / kRows; ++i) {
    const long long token = first + row + i * kRows;
    const bool there = within && token < work.end && is_seen(p, work.batch, token);
    copy16_async(target + i * kApart, there ? source : from.data, there);
    source += step;
  }
}

// Adjacent rows of a chunk's tokens.
template <int Rows, typename T>
__device__ inline void load_square(T* to, const T* from) {
  constexpr int kUnits = kChunk / 8;
  constexpr int kAtOnce = kChunkThreads / kUnits;
  static_assert(Rows % kAtOnce == 0);
  const unsigned target = shared_address(to + threadIdx.x / kUnits * kSquare + threadIdx.x % kUnits * 8);
#pragma unroll
  for (int i = 0; i < Rows / kAtOnce; ++i) {
    copy16_async(target + i * kAtOnce * kSquare * 2, from + (i * kChunkThreads + threadIdx.x) * 8, true);
  }
}

// Four tiles of 8 by 8 as float32, in the layout of MMA accumulators, from 16-bit elements that are transposed.
template <typename T>
__device__ inline void sums_from(uint4 four, float (&first)[4], float (&second)[4]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float2 a = unpack(word(four, i), T{});
    const float2 b = unpack(word(four, 2 + i), T{});
    first[2 * i] = a.x;
    first[2 * i + 1] = a.y;
    second[2 * i] = b.x;
    second[2 * i + 1] = b.y;
  }
}

// The other sign of eight numbers.
__device__ inline uint4 negative(const uint4& x) {
  constexpr unsigned kSigns = 0x80008000;
  return make_uint4(x.x ^ kSigns, x.y ^ kSigns, x.z ^ kSigns, x.w ^ kSigns);
}

// A warp's part of a head's state, in the layout of MMA accumulators: its transpose, with a row for each element of a key.
class StateTile {
 public:
  float at[kStateBlocks][2][4];

  // From p.state_in, or zeros.
  __device__ StateTile(const Recurrence& p, const Work& work, int first_key, int first_value, int value)
      : p_(p),
        first_key_(first_key),
        first_value_(first_value),
        value_(value),
        place_(((static_cast<long long>(work.sequence) * p.value_heads + work.head) * p.value_size + first_value) * p.key_size) {
    load(p.state_in);
  }

  // Null: zeros.
  __device__ void load(const float* from) {
    each([&](float& mine, bool there, long long place) { mine = there && from ? from[place] : 0.0f; });
  }

  // To p.state_out.
  __device__ void store() {
    each([&](float& mine, bool there, long long place) {
      if (there) {
        p_.state_out[place] = mine;
      }
    });
  }

  __device__ void scale(float by) {
#pragma unroll
    for (int e = 0; e < kStateBlocks * 8; ++e) {
      at[e / 8][e / 4 % 2][e % 4] *= by;
    }
  }

  // In 16 bits to the block's part of the state in shared memory.
  template <typename T>
  __device__ void write(T* to) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int b = 0; b < kStateBlocks; ++b) {
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        T* const tile = to + (first_key_ + b * 16 + lane / 4) * kThin + value_ + t * 8 + lane % 4 * 2;
        write_pair(tile, at[b][t][0], at[b][t][1]);
        write_pair(tile + 8 * kThin, at[b][t][2], at[b][t][3]);
      }
    }
  }

 private:
  template <typename Do>
  __device__ void each(Do&& with) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int b = 0; b < kStateBlocks; ++b) {
#pragma unroll
      for (int t = 0; t < 2; ++t) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int key = first_key_ + b * 16 + lane / 4 + e / 2 * 8;
          const int value = value_ + t * 8 + lane % 4 * 2 + e % 2;
          with(
              at[b][t][e], key < p_.key_size && first_value_ + value < p_.value_size,
              place_ + static_cast<long long>(value) * p_.key_size + key);
        }
      }
    }
  }

  const Recurrence& p_;
  int first_key_, first_value_, value_;
  long long place_;
};

// The shared memory of a block of a scan, and the roles of its threads in MMAs: four warps share the tokens, or the elements of a
// key; two of them the values. `Back`: of chunk_scan_back, which has no V'.
template <typename T, bool Back>
struct ScanBlock {
  const Recurrence& p;
  const Prepared& from;
  int block;
  T* q;  // the first
  T* k = q + kChunk * kPitch;
  T* w = k + kChunk * kPitch;
  T* scores = w + kChunkKeys * kSquare;
  T* prepared = scores + kChunk * kSquare;                          // V'
  T* state = prepared + (Back ? 0 : kScanColumns * kSquare);        // S, or R
  T* given = state + kChunkKeys * kThin;                            // U, or dY
  T* faded = given + kChunk * kThin;                                // that with the decay to the chunk's end, or from its beginning
  T* rest = faded + kChunk * kThin;                                 // what 16 bits leave of that, or dU
  float* decays = reinterpret_cast<float*>(rest + kChunk * kThin);  // of two chunks
  int tiles = (p.value_size + kScanColumns - 1) / kScanColumns;
  int first_value = block % tiles * kScanColumns;
  long long of = block / tiles;
  Work work{p, static_cast<int>(of)};
  int part = threadIdx.x / 32 % 4;
  int half_of_values = threadIdx.x / 128 * 16;
  int lane = threadIdx.x % 32;
  int g = lane / 4;
  int c = lane % 4 * 2;

  __device__ float* decay(int chunk) const {
    return decays + chunk % 2 * 2 * kChunk;
  }
  __device__ void load_decays(int chunk, long long block_of_chunk) const {
    if (threadIdx.x < 2 * kChunk / 4) {
      const int i = threadIdx.x * 4;
      copy16_async(shared_address(decay(chunk) + i), from.decay + block_of_chunk * 2 * kChunk + i, true);
    }
  }
};

// A scan block's part of a chunk, 32 columns of the values, and the addresses of the chunk's rows and their number.
template <typename T>
__device__ inline void write_columns(
    T* to, long long chunk, const Recurrence& p, int first_value, const T* from, int tile_rows, int rows) {
  constexpr int kUnits = kScanColumns / 8;
  for (int i = threadIdx.x; i < tile_rows * kUnits; i += kChunkThreads) {
    const int row = i / kUnits;
    const int value = i % kUnits * 8;
    if (row < rows && first_value + value < p.value_size) {
      *reinterpret_cast<uint4*>(to + (chunk * rows + row) * p.value_size + first_value + value) =
          *reinterpret_cast<const uint4*>(from + row * kThin + value);
    }
  }
}

// The decays and betas of a chunk's tokens, two adjacent ones per lane of a warp. Missing and masked tokens have a decay of 1 and
// a beta of 0.
struct Gates {
  float logs[2], betas[2];
  float totals[2];  // logarithms of the decay from the chunk's beginning
  float whole;      // to its end

  __device__ Gates(const Recurrence& p, const Work& work, int first) {
    const int lane = threadIdx.x % 32;
    bool there[2];
    unsigned decays[2]{}, factors[2]{};  // as stored
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const long long token = first + 2 * lane + i;
      there[i] = token < work.end && is_seen(p, work.batch, token);
      if (there[i]) {
        decays[i] = load(p.g.data, place(p.g, work.batch, token, work.head), p.g.type);
        factors[i] = load(p.beta.data, place(p.beta, work.batch, token, work.head), p.beta.type);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      betas[i] = there[i] ? number(factors[i], p.beta.type) : 0.0f;
      logs[i] = nan_max(logf(there[i] ? number(decays[i], p.g.type) : 1.0f), kLeastLogDecay);
    }
    float before = logs[0] + logs[1];
#pragma unroll
    for (int away = 1; away < 32; away *= 2) {
      const float other = __shfl_up_sync(~0u, before, away);
      before += lane >= away ? other : 0.0f;
    }
    totals[0] = before - logs[1];
    totals[1] = before;
    whole = __shfl_sync(~0u, before, 31);
  }
};

}  // namespace mlx_cuda
