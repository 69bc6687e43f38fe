// The short causal depthwise convolution before linear attention, and the rows that it keeps for the next tokens.
#pragma once

#include "runtime/fused.h"

#include <utility>

namespace mlx_cuda {

// Floats of 16 bits, all of one dtype. One token: an even number of channels, and 2 to 8 taps. More: a multiple of 8 channels, and
// 3 or 4 taps.
struct ShortConv {
  mx::array x;         // [batch, length, channels]
  mx::array weight;    // [channels, taps, 1]
  MaybeArray bias;     // [channels]
  MaybeArray state;    // [batch, taps - 1, channels]: the rows before; default zeros
  bool padded = true;  // otherwise the rows before are the first of x, and have no result
};

// The result, [batch, tokens, channels], and the last rows: the next state.
std::pair<mx::array, mx::array> short_conv(const ShortConv& in, bool silu, const mx::Stream& stream);

// Adds the kernel's node. Both results are allocated. If weight and bias are `constant`, never a kernel's result, it uses PDL.
void encode_short_conv(
    ShortConv in, bool silu, bool constant, mx::array& out, mx::array& next, CommandEncoder& encoder, const mx::Stream& stream);

}  // namespace mlx_cuda
