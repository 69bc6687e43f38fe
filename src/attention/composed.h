// Attention from MLX's operations: what the fused kernels are differentiated and vectorised as.
#pragma once

#include "attention/call.h"

namespace mlx_cuda {

// The same results as the fused kernels', in float32, with the scores written out, by the rules of `composed_attention` in
// python/mlx_cuda/_attention/composed.py; no pages. A query that sees no key gives zeros, and no NaN is on the way.
Arrays composed_attention(const AttentionArrays& in, const AttentionOptions& options, const mx::Stream& on);

// The keys that there are in pages, one after another as [B, Hkv, n * page_size, D], and zeros.
mx::array pages_in_order(const mx::array& pages, const mx::array& table, const mx::array& ends, const mx::Stream& on);

}  // namespace mlx_cuda
