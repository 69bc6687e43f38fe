#pragma once

#include "attention/flash/params.h"
#include "runtime/arrays.h"

#include <mlx/backend/cuda/device.h>
#include <mlx/stream.h>

#include <utility>

namespace mlx_cuda {

// Encodes the pass over a mask, a view of [B, H, Tq, Tk] (bool, float16, bfloat16 or float32; broadcast dimensions have stride 0),
// for a kernel that takes `tile_rows` queries and `tile_keys` keys (a multiple of 32) at a time. `shifting`: nothing but the
// weights depends on the scores, so that they may be shifted. The caller names the memory that is returned as well, and the mask
// itself, as inputs of its own node. Like every allocation, this comes before that.
std::pair<FlashMask, mx::array> summarize_mask(
    const mx::array& mask, int tile_rows, int tile_keys, bool shifting, CommandEncoder& encoder, const mx::Stream& stream);

}  // namespace mlx_cuda
