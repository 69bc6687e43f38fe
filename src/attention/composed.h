// Attention from MLX's operations: the definition of the fused kernels' gradients and vmap.
#pragma once

#include "attention/call.h"

namespace mlx_cuda {

// Unfused attention in float32, with the scores written out, by the rules of `composed_attention` in
// python/mlx_cuda/_attention/composed.py; no paged KV cache. A query that sees no key gives zeros without a NaN in between.
Arrays composed_attention(const AttentionArrays& in, const AttentionOptions& options, const mx::Stream& on);

// Gathers the keys of a paged KV cache as [B, Hkv, n * page_size, D], with zeros beyond them.
mx::array pages_in_order(const mx::array& pages, const mx::array& table, const mx::array& ends, const mx::Stream& on);

}  // namespace mlx_cuda
