#pragma once

#include "attention/call.h"

#include <string>

namespace mlx_cuda {

// Attention by kernels that never write the scores, also of float32 (which the tensor cores round to TF32). D and Dv are multiples
// of 8 up to 256; with 16 bits D may be up to 576 and Dv up to 512. No dimension is empty, there is no table, and the GPU is of
// compute capability 8.0 or newer.
Arrays flash_attention(const AttentionArrays& in, const AttentionOptions& options, const mx::Stream& stream);

// Sequences of different lengths, one after another in q [total_q, H, D], k [total_k, Hkv, D] and v [total_k, Hkv, Dv]: sequence b
// has the rows from cu_q[b] to cu_q[b + 1] and the keys from cu_k[b] to cu_k[b + 1] (int32 [B + 1]).
struct PackedArrays {
  mx::array q;
  mx::array k;
  mx::array v;
  mx::array cu_q;
  mx::array cu_k;
  MaybeArray sinks;
};

// An upper limit of the sequences' lengths.
struct PackedLengths {
  int q;
  int k;

  bool operator==(const PackedLengths&) const = default;
};

// The same for them. lse is [H, total_q].
Arrays flash_varlen(const PackedArrays& in, PackedLengths longest, const AttentionOptions& options, const mx::Stream& stream);

// The kernel of such a call on the current GPU, with its source, such as "flash_sm90 flash_bfloat16_128_plain"; "" if there is
// none. Only the shape and dtype of a mask are read.
std::string flash_kernel(const AttentionArrays& in, const AttentionOptions& options);

}  // namespace mlx_cuda
