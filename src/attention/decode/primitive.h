#pragma once

#include "attention/call.h"

#include <optional>
#include <string>
#include <utility>

namespace mlx_cuda {

// Attention of 16-bit floats by kernels that read k and v once. D and Dv are multiples of 8, D up to 576 and Dv up to 512, and no
// dimension is empty. Heads over 256 need 160 KB of shared memory in a block (sm_80, sm_90, sm_100).
//
// With a table, k and v are pages [P, Hkv, page_size, D or Dv], page_size a multiple of 16, and `ends` is given: keys of an entry
// lie in the pages that its row of the table names; entries beyond what `ends` needs may be anything.
Arrays decode_attention(const AttentionArrays& in, const AttentionOptions& options, const mx::Stream& stream);

// The call that such an array is the result of, without pages; none of another array.
std::optional<std::pair<AttentionArrays, AttentionOptions>> decode_call(const mx::array& out);

// The source and the kernel that such a call gets on the current device, such as "decode_sm90 decode_bfloat16_128_rows". Where
// arrays lie in memory decides too: those that have not been evaluated count as row-contiguous and apart.
std::string decode_kernel(const AttentionArrays& in, const AttentionOptions& options);

}  // namespace mlx_cuda
