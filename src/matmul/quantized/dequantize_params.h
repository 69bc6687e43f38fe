// How the kernel of values is called (dequantize.cu).
#pragma once

namespace mlx_cuda {

// Distances of the packed weights and the scales in bytes, of the result in elements.
struct DequantizeParams {
  const void* w;
  const void* scales;
  const void* biases;  // or null
  const int* offsets;  // [experts + 1], or null: experts whose offset is the next one's are left out
  void* out;
  long long w_distance;
  long long scale_distance;
  long long out_distance;
  long long pieces;  // of kPiece values, of one expert
  int group_shift;   // log2 of a group's values

  static constexpr int kPiece = 8;
  static constexpr int kThreads = 256;
  static constexpr int kPieces = 2;  // of one thread
};

}  // namespace mlx_cuda
