// The update of caches in a decode step: keys and values appended in place, by a primitive whose results are the caches; and
// arrays that are replaced.
#pragma once

#include "decoding/append/params.h"
#include "runtime/arrays.h"
#include "runtime/node.h"

#include <mlx/stream.h>

namespace mlx_cuda {

inline constexpr const char* kCacheAppend = "CacheAppend";

// Inputs: keys and values [batch, heads, 1, dim], their caches [pages, heads, capacity, dim], and the pages and rows of each
// sequence, int32 [2, batch]; where a cache has no pages a sequence is its own.
Arrays cache_append(const Arrays& inputs, const mx::Stream& stream);

inline constexpr const char* kQuantizedCacheAppend = "QuantizedCacheAppend";

struct QuantizedAppendForm {
  int group;
  int bits;
};

// The same for a quantized KV cache, of which the inputs are the packed keys [pages, heads, capacity, dim * bits / 32], their
// scales and biases [pages, heads, capacity, dim / group], and those of the values. 4 or 8 bits; dims are multiples of 32 up to
// 256.
Arrays quantized_cache_append(const Arrays& inputs, QuantizedAppendForm form, const mx::Stream& stream);

// Of an array that such an append gave.
QuantizedAppendForm quantized_append_form(const mx::array& out);

// Makes `outputs` the memory, as the output of a kernel.
QuantizedRows quantized_rows(const Arrays& memory, Arrays& outputs, int group, KernelNode& node);

inline constexpr const char* kCacheReplace = "CacheReplace";

// The result, after which arrays have been copied to others of their shapes and dtypes, which are row-contiguous.
mx::array cache_replace(const mx::array& result, const Arrays& from, const Arrays& to, const mx::Stream& stream);

}  // namespace mlx_cuda
