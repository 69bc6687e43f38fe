#pragma once

#include "kernels/flash.h"

#include <mlx/array.h>
#include <mlx/backend/cuda/device.h>
#include <mlx/stream.h>

#include <vector>

namespace mlx_cuda {

namespace mx = mlx::core;

// Encodes the pass over a mask, a view of [B, H, Tq, Tk] (bool, float16, bfloat16 or float32; broadcast dimensions have stride 0),
// for a kernel that takes `tile_rows` queries and `tile_keys` keys (a multiple of 32) at a time. The caller names what is added to
// `made`, and the mask itself, as inputs of its own node. Like every allocation, this comes before that.
FlashMask summarize_mask(
    const mx::array& mask,
    int tile_rows,
    int tile_keys,
    std::vector<mx::array>& made,
    mx::cu::CommandEncoder& encoder,
    const mx::Stream& stream);

}  // namespace mlx_cuda
