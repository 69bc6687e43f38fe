#pragma once

#include "attention/call.h"

#include <optional>
#include <string>
#include <utility>

namespace mlx_cuda {

// Attention of 16-bit floats by kernels that read k and v once. D and Dv are multiples of 8, D up to 576 and Dv up to 512, and no
// dimension is empty. Heads over 256 need 160 KB of shared memory per block (sm_80, sm_90, sm_100).
//
// With a table, k and v are pages [P, Hkv, page_size, D or Dv], page_size is a multiple of 16, and `ends` is given: row b of the
// table names the pages of sequence b; columns beyond `ends` may be anything.
Arrays decode_attention(const AttentionArrays& in, const AttentionOptions& options, const mx::Stream& stream);

// The call that such an array is the result of, without pages; none of another array.
std::optional<std::pair<AttentionArrays, AttentionOptions>> decode_call(const mx::array& out);

// The source and the kernel of such a call on the current device, such as "decode_sm90 decode_bfloat16_128_rows". Strides and
// addresses matter too: arrays that are not evaluated count as row-contiguous and separate.
std::string decode_kernel(const AttentionArrays& in, const AttentionOptions& options);

}  // namespace mlx_cuda
