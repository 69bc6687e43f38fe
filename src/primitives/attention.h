#pragma once

#include "primitives/fused.h"

#include <string>

namespace mlx_cuda {

// Why cuDNN on this GPU does not take these shapes (with each operand contiguous); empty when it does.
std::string why_attention_unsupported(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    float scale,
    bool causal,
    int window_left,
    const mx::Stream& stream);

// Attention of q [B, H, Tq, D] with k, v [B, Hkv, Tk, D], all float16 or all bfloat16, no dimension empty, H a multiple of Hkv.
// `window_left`: keys before a query's own place that it sees (only with causal); negative: all. Only for what
// `why_attention_unsupported` accepts.
mx::array attention(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    float scale,
    bool causal,
    int window_left,
    const mx::Stream& stream);

}  // namespace mlx_cuda
