// The gradients of attention through cuDNN.
#pragma once

#include "attention/cudnn/problem.h"

#include <optional>
#include <string>

namespace mlx_cuda {

// Why cuDNN on this GPU has no backward for these shapes; empty when it has.
std::string why_backward_unsupported(
    const mx::array& q, const mx::array& k, const mx::array& v, const CudnnOptions& options, const mx::Stream& stream);

// The gradients of q, k and v, given attention's results and the gradient of `out`. Only for what `why_backward_unsupported`
// accepts. The sinks are in `lse` already; they matter when this is differentiated once more: `out` and `lse` then as functions of
// q, k, v and the sinks.
std::vector<mx::array> attention_gradients(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    const std::optional<mx::array>& sinks,
    const mx::array& out,
    const mx::array& lse,
    const mx::array& d_out,
    const CudnnOptions& options,
    const mx::Stream& stream);

}  // namespace mlx_cuda
