// How a short causal convolution of one token is called.
#pragma once

namespace mlx_cuda {

// out = f(sum of weight[:, k] * rows[k] + bias), where the rows are those that are kept, and then the token's own; kept for the
// next token: all but the first. A thread takes two channels.
struct ShortConvParams {
  static constexpr int kThreads = 128;
  static constexpr int kMostTaps = 8;

  const void* kept;    // [batch, taps - 1, channels]
  const void* row;     // [batch, channels]
  const void* weight;  // [channels, taps]
  const void* bias;    // [channels], or null
  void* out;           // [batch, channels]
  void* next;          // [batch, taps - 1, channels]
  int channels;
  int taps;
  bool silu;
};

}  // namespace mlx_cuda
