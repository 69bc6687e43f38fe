// What a token's step leaves in its caches: keys and values appended where they lie, by a primitive whose results are the caches;
// and arrays that are replaced.
#pragma once

#include <mlx/array.h>
#include <mlx/stream.h>

#include <vector>

namespace mlx_cuda {

namespace mx = mlx::core;

inline constexpr const char* kCacheAppend = "CacheAppend";

// Inputs: keys and values [batch, heads, 1, dim], their caches [batch, heads, capacity, dim], and int32 [offset, row].
std::vector<mx::array> cache_append(const std::vector<mx::array>& inputs, const mx::Stream& stream);

inline constexpr const char* kCacheReplace = "CacheReplace";

// The result, after which arrays have been copied to others of their shapes and dtypes, which are row-contiguous.
mx::array cache_replace(
    const mx::array& result, const std::vector<mx::array>& from, const std::vector<mx::array>& to, const mx::Stream& stream);

}  // namespace mlx_cuda
