// Constants and parameters that the recurrent kernel's host and device code share.
#pragma once

namespace mlx_cuda {

inline constexpr int kRecurrentLanes = 8;      // that share rows of the state
inline constexpr int kRecurrentRows = 32;      // of the state, in a block
inline constexpr int kRecurrentThreads = 128;  // of the kernel for many tokens, each with two rows
inline constexpr int kRecurrentTokens = 16;    // whose operands are in shared memory at once; two such stages take turns
inline constexpr int kRecurrentKeys = 4 * kRecurrentLanes;  // elements of a key in one step of all lanes
inline constexpr int kRecurrentLargestKey = 256;
inline constexpr int kFewTokens = 4;  // of a sequence, for which the kernel without shared memory is the better one
inline constexpr int kFewThreads = 128;
inline constexpr int kFewBlocks = 5;  // on an SM, of short keys

// As operands are stored; all arithmetic is float32.
enum class Stored : int { float32, float16, bfloat16 };

struct Operand {
  const void* data;
  long long batch, token, head;  // distances in elements; those of a head or key are adjacent
  Stored type;
};

struct Recurrence {
  Operand q, k, v, g, beta;
  const bool* mask;                  // [batch, token], or null
  const int* offsets;                // of packed sequences (varlen), or null
  const float* state_in;             // [sequence, value head, value size, key size], or null: zeros
  void* out;                         // [batch, token, value head, value size], stored as v
  float* state_out;                  // as state_in; may be the same memory
  long long mask_batch, mask_token;  // distances
  int length;                        // tokens of a sequence, or of all packed ones
  int key_heads, value_heads;
  int key_size, value_size;
  bool delta;  // delta rule
};

// Bytes of shared memory for keys padded to so many elements.
constexpr unsigned recurrent_shared_bytes(int keys, bool channels) {
  return 2 * 4 * (kRecurrentTokens * ((channels ? 3 : 2) * keys + 2 * kRecurrentRows + 4) + (channels ? 0 : 4));
}

}  // namespace mlx_cuda
