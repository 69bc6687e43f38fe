#pragma once

#include "runtime/fused.h"

#include <optional>
#include <utility>

namespace mlx_cuda {

struct Way {
  bool delta;    // S = g S, then S += beta (v - S k) k^T; without, S += beta v k^T; and y = S q
  bool chunked;  // by chunks of tokens on tensor cores: 16 bits, one decay per head, Dk up to 128, Dv a multiple of 8, not varlen
  bool operator==(const Way&) const = default;
};

struct LinearAttention {
  mx::array q, k;      // [B, T, Hk, Dk]
  mx::array v;         // [B, T, Hv, Dv], of the same dtype
  mx::array g;         // [B, T, Hv], or [B, T, Hv, Dk] with the delta rule
  mx::array beta;      // [B, T, Hv]
  MaybeArray state;    // float32 [B, Hv, Dv, Dk]
  MaybeArray mask;     // bool [B, T]
  MaybeArray offsets;  // int32 [sequences + 1]: then B is 1, and the state's first dimension the sequences
};

// y like v, and the state after the last token. Dk is a multiple of 8 up to 256, and there is at least one token; floats of 16 or
// 32 bits.
std::pair<mx::array, mx::array> linear_attention(const LinearAttention& in, Way way, const mx::Stream& stream);

// The scans over the chunks of a sequence, forward and backward, for calls that `chunked` supports: the states, changes,
// gradients and change_gradients of Kept (chunked_params.h) in the dtype of the values, the gradient of the first state, and with
// the delta rule also Kept's solve. `dy` is the gradient of y, in its dtype, and `last` that of the last state in float32. None
// if there are no kernels.
std::optional<Arrays> linear_attention_scan(
    const LinearAttention& in, const mx::array& dy, const mx::array& last, bool delta, const mx::Stream& stream);

// The gradients of q, k, v, and in float32 of g and beta, from these results: values of up to 128 elements, on a GPU with enough
// shared memory. None if no kernel supports the call.
std::optional<Arrays> linear_attention_gradients(
    const LinearAttention& in, const mx::array& dy, const Arrays& scan, const mx::Stream& stream);

}  // namespace mlx_cuda
