// The state that producer and consumers of flash_sm90.cu share: shared memory with its barriers, and stage and phase.
#pragma once

#include "attention/flash/kernels.h"
#include "device/ptx.cuh"

namespace mlx_cuda {

template <typename Element, FlashSm90Shape Shape, FlashKind Kind>
struct Traits {
  using T = Element;
  static constexpr FlashKind kKind = Kind;
  static constexpr bool kGeneral = Kind == FlashKind::general;
  static constexpr bool kBiased = Kind == FlashKind::biased;
  static constexpr int kStages = Shape.kStages;
  static constexpr int kHeadDim = Shape.head_dim;
  static constexpr int kKeys = Shape.keys;
  static constexpr int kRows = Shape.rows();
  static constexpr int kGroups = Shape.consumers;
  static constexpr int kThreads = Shape.threads();
  static constexpr int kConsumers = kGroups * 128;  // threads
  static constexpr int kQueryBytes = Shape.query_bytes();
  static constexpr int kTileBytes = Shape.tile_bytes();
  static constexpr int kBiasBytes = Shape.bias_bytes(Kind);
  static constexpr int kChunk = 64;  // columns in 128 adjacent bytes
  static constexpr int kConsumerRegisters = kGroups == 2 ? 240 : 160;
  static constexpr int kProducerRegisters = kGroups == 2 ? 24 : 32;
  static_assert(Shape.shared_bytes(Kind) <= 227 * 1024);  // the limit of a block on Hopper
};

template <typename Traits>
struct Shared {
  char* queries;
  char* keys;
  char* values;
  char* bias;
  Barrier* queries_full;
  Barrier* queries_empty;
  Barrier* keys_full;
  Barrier* keys_empty;
  Barrier* values_full;
  Barrier* values_empty;
  Barrier* bias_full;
  Barrier* bias_empty;

  __device__ explicit Shared(char* memory) {
    constexpr int stages = Traits::kStages;
    queries = memory + (1024 - shared_address(memory) % 1024) % 1024;
    keys = queries + Traits::kQueryBytes;
    values = keys + stages * Traits::kTileBytes;
    bias = values + stages * Traits::kTileBytes;
    queries_full = reinterpret_cast<Barrier*>(bias + stages * Traits::kBiasBytes);
    queries_empty = queries_full + 1;
    keys_full = queries_empty + 1;
    keys_empty = keys_full + stages;
    values_full = keys_empty + stages;
    values_empty = values_full + stages;
    bias_full = values_empty + stages;
    bias_empty = bias_full + stages;
  }

  __device__ void init_barriers() const {
    auto init = [](Barrier* full, Barrier* empty, int count) {
      for (int i = 0; i < count; ++i) {
        barrier_init(full + i, 1);
        barrier_init(empty + i, Traits::kConsumers);
      }
    };
    init(queries_full, queries_empty, 1);
    init(keys_full, keys_empty, Traits::kStages);
    init(values_full, values_empty, Traits::kStages);
    init(bias_full, bias_empty, Traits::kStages);
    barrier_init_fence();
  }
};

// How often the stages, and the queries' buffer, have been filled so far: the same for producer and consumers.
template <typename Traits>
struct Turn {
  int block = 0;
  int tile = 0;

  __device__ int stage() const {
    return tile % Traits::kStages;
  }
  __device__ int parity() const {
    return tile / Traits::kStages % 2;
  }
};

}  // namespace mlx_cuda
