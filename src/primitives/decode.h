#pragma once

#include "primitives/composed.h"
#include "primitives/fused.h"

namespace mlx_cuda {

// Attention of q [B, H, Tq, D] with k, v [B, Hkv, Tk, D], all float16 or all bfloat16, by kernels that read k and v once.
// D is a multiple of 8 up to 256, no dimension is empty, and Tq * H / Hkv is within MOST_ROWS of _dispatch.py.
mx::array decode_attention(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    const AttentionExtras& extras,
    const AttentionOptions& options,
    const mx::Stream& stream);

}  // namespace mlx_cuda
