// The ring of shared memory of the grouped products on Hopper: parts of both operands, each 64 deep, that one warp has copied and
// others multiply.
#pragma once

#include "device/pipeline.cuh"

namespace mlx_cuda {

constexpr int kRows = 128;  // of a tile
constexpr int kDepth = 64;  // of a part: 128 adjacent bytes, or 64 rows of them

template <int Columns, int Stages>
struct Ring {
  static constexpr int kRowBytes = kRows * kDepth * 2;
  static constexpr int kWeightBytes = Columns * kDepth * 2;
  static constexpr int kBytes = Stages * (kRowBytes + kWeightBytes) + 1024 + 2 * Stages * 8;
  static_assert(kBytes <= 227 * 1024);  // what a block on Hopper may have

  char* rows;
  char* weights;
  Barrier* full;
  Barrier* empty;
  int stage = 0;
  int parity = 0;

  __device__ explicit Ring(char* memory) {
    rows = memory + (1024 - shared_address(memory) % 1024) % 1024;
    weights = rows + Stages * kRowBytes;
    full = reinterpret_cast<Barrier*>(weights + Stages * kWeightBytes);
    empty = full + Stages;
  }
  // One thread; `writers` say that a part is there, `readers` that it has been read.
  __device__ void init(int writers, int readers) const {
    for (int i = 0; i < Stages; ++i) {
      barrier_init(full + i, writers);
      barrier_init(empty + i, readers);
    }
    barrier_init_fence();
  }
  __device__ void advance() {
    ++stage;
    if (stage == Stages) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ void skip(int parts) {
    parity ^= (stage + parts) / Stages % 2;
    stage = (stage + parts) % Stages;
  }
  __device__ char* row_part() const {
    return rows + stage * kRowBytes;
  }
  __device__ char* weight_part() const {
    return weights + stage * kWeightBytes;
  }
};

}  // namespace mlx_cuda
