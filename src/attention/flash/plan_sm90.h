// The flash kernels for Hopper (attention/flash/flash_sm90.cu).
#pragma once

#include "attention/flash/params.h"

#include <mlx/array.h>
#include <mlx/backend/cuda/device.h>

#include <optional>

namespace mlx_cuda {

namespace mx = mlx::core;

// What one block takes at a time.
struct FlashTile {
  int rows;
  int keys;
};

// Whether this GPU has them and they are for such operands, float16 or bfloat16 with head_dims up to 256: [B, H, T, D], or
// [total, H, D] of packed sequences. These have to be `copyable`, as every copy of them is.
bool flash_sm90_takes(const mx::array& q, const mx::array& v);

FlashTile flash_sm90_tile(int head_dim, int v_head_dim);

// A mask as the kernels read it fastest: an additive one that the copy engine does not take is copied, without what is broadcast in
// it, where its rows can lie on 16 bytes. The caller has filled `params` but for the pointers of its operands.
mx::array flash_sm90_mask(
    const FlashParams& params, const mx::array& mask, mx::cu::CommandEncoder& encoder, const mx::Stream& stream);

// Adds the kernel's node; the caller has filled `params` (but for `section` and `cap`) and has named inputs and outputs.
void encode_flash_sm90(
    FlashParams params,
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    const std::optional<mx::array>& mask,
    mx::cu::CommandEncoder& encoder);

}  // namespace mlx_cuda
