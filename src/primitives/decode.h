#pragma once

#include "primitives/composed.h"
#include "primitives/fused.h"

namespace mlx_cuda {

// The most rows (queries of the heads that share a kv head) that one read of the keys serves, by head_dim; 0 where there is no
// kernel.
int decode_rows(int head_dim);

// Attention of q [B, H, Tq, D] with k, v [B, Hkv, Tk, D], all float16 or all bfloat16, by kernels that read k and v once.
// Tq * H / Hkv must be at most `decode_rows(D)`, D a multiple of 8, no dimension empty.
mx::array decode_attention(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    const AttentionExtras& extras,
    const AttentionOptions& options,
    const mx::Stream& stream);

}  // namespace mlx_cuda
