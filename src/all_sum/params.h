// Parameters of the all-reduce kernel, and the layout of peer memory.
#pragma once

namespace mlx_cuda {

// out = all-reduce of x + added. Warps take turns at `parts` of 448 bytes of x.
struct AllSumParams {
  static constexpr int kMost = 8;  // processes
  static constexpr int kThreads = 256;
  static constexpr int kMostBlocks = 256;
  static constexpr int kBlocksPerMultiprocessor = 4;
  static constexpr int kMostWarps = kMostBlocks * kThreads / 32;
  static constexpr int kData = 448;     // bytes of x, of a warp
  static constexpr int kLetters = 512;  // bytes that it writes for them to every other GPU
  static constexpr int kMostParts = 4;
  static constexpr int most_parts(int count) {
    return count > 2 ? 1 : kMostParts;
  }

  // The memory of each process. Read only by the process itself: whether its sums are local, as during a capture, and the numbers
  // of each warp's last packets [kMostWarps, kMostParts]. Then the packets of the others, for alternating numbers: [2, count - 1,
  // kMostWarps, most_parts, kLetters].
  static constexpr int kAlone = 16;
  static constexpr long long letters() {
    return kAlone + kMostWarps * kMostParts * 2;
  }
  static constexpr long long bytes(int count) {
    return letters() + 2LL * (count - 1) * kMostWarps * most_parts(count) * kLetters;
  }

  const void* x;
  const void* added;  // or null
  void* out;
  void* memory[kMost];  // of each process
  int rank;
  int count;
  int parts;
  long long size;  // of x, in bytes: a multiple of 16
};

}  // namespace mlx_cuda

// all_sum.cu. EACH(name, dtype).
#define MLX_CUDA_ALL_SUM_KERNELS(EACH) \
  EACH(all_sum_float32, float32) EACH(all_sum_float16, float16) EACH(all_sum_bfloat16, bfloat16)
