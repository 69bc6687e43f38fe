// Attention through cuDNN.
#pragma once

#include "attention/cudnn/problem.h"

#include <optional>
#include <string>
#include <vector>

namespace mlx_cuda {

// Why cuDNN on this GPU does not take these shapes (with each operand contiguous); empty when it does.
std::string why_attention_unsupported(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    const std::optional<mx::array>& sinks,
    const CudnnOptions& options,
    bool with_lse,
    const mx::Stream& stream);

// Attention of q [B, H, Tq, D] with k [B, Hkv, Tk, D] and v [B, Hkv, Tk, Dv], all float16 or all bfloat16, no dimension empty, H a
// multiple of Hkv; sinks [H] of any floating type. Returns [out], or [out, lse] with float32 [B, H, Tq]. Only for what
// `why_attention_unsupported` accepts.
std::vector<mx::array> attention(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    const std::optional<mx::array>& sinks,
    const CudnnOptions& options,
    bool with_lse,
    const mx::Stream& stream);

}  // namespace mlx_cuda
