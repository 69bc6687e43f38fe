// How the short causal convolution before linear attention is called.
#pragma once

namespace mlx_cuda {

// out[t] = f(sum of weight[:, k] * rows[t + k] + bias), where the rows are those that were kept of the tokens before, and then the
// tokens' own; kept for the next tokens: the last. Distances are in elements.
struct ShortConvParams {
  static constexpr int kThreads = 128;
  static constexpr int kMostTaps = 8;        // of one token, where each thread has two channels
  static constexpr int kTile = 8;            // tokens and channels of a thread, where there are several tokens and 3 or 4 taps
  static constexpr int kMostBlocks = 65535;  // of a sequence's channels, and sequences

  const void* kept;    // [batch, taps - 1, channels], or null: zeros
  const void* rows;    // [batch, length, channels]
  const void* weight;  // [channels, taps]
  const void* bias;    // [channels], or null
  void* out;           // [batch, length, channels]
  void* next;          // [batch, taps - 1, channels]
  long long kept_batch, kept_row, batch, row;
  int channels;
  int taps;
  int length;
  bool silu;
  bool constant;  // weight and bias are never a kernel's result
};

}  // namespace mlx_cuda
