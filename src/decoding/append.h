// A token's keys and values, appended to a cache where it lies: a primitive whose results are the caches.
#pragma once

#include <mlx/array.h>
#include <mlx/stream.h>

#include <vector>

namespace mlx_cuda {

namespace mx = mlx::core;

inline constexpr const char* kCacheAppend = "CacheAppend";

// Inputs: keys and values [batch, heads, 1, dim], their caches [batch, heads, capacity, dim], and int32 [offset, row].
std::vector<mx::array> cache_append(const std::vector<mx::array>& inputs, const mx::Stream& stream);

}  // namespace mlx_cuda
