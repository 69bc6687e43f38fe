#pragma once

#include "attention/flash/params.h"
#include "runtime/arrays.h"

#include <mlx/backend/cuda/device.h>
#include <mlx/stream.h>

#include <utility>

namespace mlx_cuda {

// Encodes the pass over a mask, a view of [B, H, Tq, Tk] (bool, float16, bfloat16 or float32; broadcast dimensions have stride
// 0), for a kernel with tiles of `tile_rows` queries and `tile_keys` keys (a multiple of 32). `shifting`: only the weights depend
// on the scores, so that they may be shifted. The caller sets the returned memory, and the mask itself, as inputs of its own
// node. Like every allocation, this comes before that.
std::pair<FlashMask, mx::array> summarize_mask(
    const mx::array& mask, int tile_rows, int tile_keys, bool shifting, CommandEncoder& encoder, const mx::Stream& stream);

}  // namespace mlx_cuda
