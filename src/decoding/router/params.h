// Parameters of the MoE router.
#pragma once

namespace mlx_cuda {

// The function of the scores, before or after top-k.
enum class RouterScores : int {
  plain,
  softmax,     // of all experts, before; or of the chosen ones, after
  normalised,  // divided by their sum, after
};

struct RouterParams {
  static constexpr int kMostExperts = 512;
  static constexpr int kMostChosen = 32;  // a lane for each

  const void* logits;  // [experts]
  unsigned* chosen;    // [count], the best last
  void* scores;        // [count]
  int experts;
  int count;
  int first_of_equals;  // whether the first of equal ones is better, or the last
  RouterScores before;
  RouterScores after;
};

}  // namespace mlx_cuda

// router.cu. EACH(name, dtype).
#define MLX_CUDA_ROUTER_KERNELS(EACH) EACH(router_float32, float32) EACH(router_float16, float16) EACH(router_bfloat16, bfloat16)
