// Common parts of grouped GEMMs and their gradient on Hopper: the pipeline stages of both operands, and the epilogue.
#pragma once

#include "device/ptx.cuh"
#include "matmul/grouped/params.h"

namespace mlx_cuda {

constexpr int kRows = GroupedSm90Tile::kRows;
constexpr int kDepth = GroupedSm90Tile::kDepth;
[[maybe_unused]] constexpr int kConsumers = GroupedSm90Tile::kConsumers;

template <int Columns, int Stages>
struct Ring {
  static constexpr GroupedSm90Tile kTile{Columns, Stages};
  static constexpr int kRowBytes = GroupedSm90Tile::kRowBytes;
  static constexpr int kWeightBytes = kTile.weight_bytes();
  static_assert(kTile.shared_bytes() <= 227 * 1024);  // the limit of a block on Hopper

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
  // One thread; `writers` say that a stage is full, `readers` that it has been read.
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
  __device__ void skip(int steps) {
    parity ^= (stage + steps) / Stages % 2;
    stage = (stage + steps) % Stages;
  }
  __device__ void wait_full() const {
    barrier_wait(full + stage, parity);
  }
  __device__ void wait_empty() const {
    barrier_wait(empty + stage, parity ^ 1);
  }
  __device__ char* row_part() const {
    return rows + stage * kRowBytes;
  }
  __device__ char* weight_part() const {
    return weights + stage * kWeightBytes;
  }
};

// A warp has read a stage, or filled it.
__device__ inline void release(Barrier* barrier) {
  if (threadIdx.x % 32 == 0) {
    barrier_arrive(barrier);
  }
}

}  // namespace mlx_cuda
