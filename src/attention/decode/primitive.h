#pragma once

#include "attention/composed.h"
#include "runtime/fused.h"

#include <optional>
#include <string>
#include <vector>

namespace mlx_cuda {

// Attention of q [B, H, Tq, D] with k [B, Hkv, Tk, D] and v [B, Hkv, Tk, Dv], all float16 or all bfloat16, by kernels that read k
// and v once: the result [B, H, Tq, Dv] and, if asked for, the logarithms of the sums, float32 [B, H, Tq]. D and Dv are multiples
// of 8, D up to 576 and Dv up to 512, and no dimension is empty. Heads over 256 need 160 KB of shared memory in a block (sm_80,
// sm_90, sm_100).
//
// With a table, int32 [B, n], k and v are pages [P, Hkv, page_size, D or Dv], page_size a multiple of 16, and `extras.ends` is
// given: keys of an entry lie in the pages that its row of the table names; entries beyond what `ends` needs may be anything.
std::vector<mx::array> decode_attention(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    const AttentionExtras& extras,
    const AttentionOptions& options,
    bool with_lse,
    const mx::Stream& stream,
    const std::optional<mx::array>& table = std::nullopt);

// The source and the kernel that such a call gets on the current device, such as "decode_sm90 decode_bfloat16_128_rows". Where
// arrays lie in memory decides too: those that have not been evaluated count as row-contiguous and apart.
std::string decode_kernel(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    const AttentionExtras& extras,
    const AttentionOptions& options,
    const std::optional<mx::array>& table = std::nullopt);

}  // namespace mlx_cuda
