#pragma once

#include "attention/composed.h"
#include "runtime/fused.h"

#include <string>
#include <vector>

namespace mlx_cuda {

// Attention of q [B, H, Tq, D] with k [B, Hkv, Tk, D] and v [B, Hkv, Tk, Dv], all float16, bfloat16 or float32 (which the tensor
// cores round to TF32), by kernels that never write the scores. D and Dv are multiples of 8 up to 256; with 16 bits D may be up to
// 576 and Dv up to 512. No dimension is empty, and the GPU is of compute capability 8.0 or newer.
// Returns [out], or [out, lse] with the logarithms of the sums, float32 [B, H, Tq].
std::vector<mx::array> flash_attention(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    const AttentionExtras& extras,
    const AttentionOptions& options,
    bool with_lse,
    const mx::Stream& stream);

// The same for sequences of different lengths, one after another in q [total_q, H, D], k [total_k, Hkv, D] and v [total_k, Hkv,
// Dv]: sequence b has the rows from cu_q[b] to cu_q[b + 1] and the keys from cu_k[b] to cu_k[b + 1] (int32 [B + 1]). No sequence is
// longer than max_q and max_k. lse is [H, total_q].
std::vector<mx::array> flash_varlen(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    const mx::array& cu_q,
    const mx::array& cu_k,
    const std::optional<mx::array>& sinks,
    int max_q,
    int max_k,
    const AttentionOptions& options,
    bool with_lse,
    const mx::Stream& stream);

// The kernel that such a call gets on the current GPU, with its source, such as "flash_sm90 flash_bfloat16_128_plain"; "" where
// there is none. Of a mask nothing is read but its shape and dtype.
std::string flash_kernel(
    const mx::array& q, const mx::array& v, const AttentionExtras& extras, const AttentionOptions& options, bool with_lse);

}  // namespace mlx_cuda
