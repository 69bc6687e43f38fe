// Attention through cuDNN, its gradients and its logarithms: of q, k, v and perhaps sinks, without a softcap, causal or without a
// right side of the window.
#pragma once

#include "attention/call.h"

#include <string>

namespace mlx_cuda {

// Why cuDNN on this GPU does not take these shapes (with each operand contiguous); empty when it does.
std::string why_attention_unsupported(const AttentionArrays& in, const AttentionOptions& options, const mx::Stream& stream);

// Attention, all float16 or all bfloat16, no dimension empty; sinks of any floating type. Only for what `why_attention_unsupported`
// accepts.
Arrays attention(const AttentionArrays& in, const AttentionOptions& options, const mx::Stream& stream);

// Why cuDNN on this GPU has no backward for these shapes; empty when it has.
std::string why_backward_unsupported(const AttentionArrays& in, const AttentionOptions& options, const mx::Stream& stream);

// The gradients of q, k and v, given attention's results and the gradient of `out`. Only for what `why_backward_unsupported`
// accepts. The sinks are in `lse` already; they matter when this is differentiated once more: `out` and `lse` then as functions of
// q, k, v and the sinks.
Arrays attention_gradients(
    const AttentionArrays& in,
    const Arrays& out_and_lse,
    const mx::array& d_out,
    const AttentionOptions& options,
    const mx::Stream& stream);

// The `lse` of attention(q, k, v) with a gradient of its own. Attention's backward pass leaves it out, because the gradient of
// the output needs one pass of cuDNN, and that of lse two more.
mx::array differentiable_lse(
    const AttentionArrays& in, const mx::array& lse, const AttentionOptions& options, const mx::Stream& stream);

}  // namespace mlx_cuda
