// Attention from MLX's operations: what the fused kernels are differentiated and vectorised as.
#pragma once

#include <mlx/array.h>
#include <mlx/stream.h>

#include <optional>
#include <vector>

namespace mlx_cuda {

namespace mx = mlx::core;

// What a query sees, and how its scores become weights.
struct AttentionOptions {
  float scale = 1;        // > 0
  float softcap = 0;      // 0: none
  int window_left = -1;   // keys before the diagonal; negative: all
  int window_right = -1;  // keys after it; negative: all; 0 is causal

  bool operator==(const AttentionOptions&) const = default;
};

// What attention may be given besides q, k and v.
struct AttentionExtras {
  std::optional<mx::array> mask{};    // bool or of q's dtype, with the shape [B, H, Tq, Tk] (broadcast views are read in place)
  std::optional<mx::array> starts{};  // int32 [B]: the first key of each batch entry
  std::optional<mx::array> ends{};    // int32 [B]: the key after its last; queries are the last ones before it
  std::optional<mx::array> sinks{};   // of q's dtype [H]
};

// The same result as the fused kernels, in float32, with the scores written out, by the rules of `composed_attention` in
// python/mlx_cuda/_attention/composed.py. A query that sees no key gives zeros, and no NaN is on the way.
mx::array composed_attention(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    const AttentionExtras& extras,
    const AttentionOptions& options,
    const mx::Stream& on);

// The same, and the logarithms of the sums that the weights are divided by, float32 [B, H, Tq].
std::vector<mx::array> composed_attention_and_lse(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    const AttentionExtras& extras,
    const AttentionOptions& options,
    const mx::Stream& on);

}  // namespace mlx_cuda
