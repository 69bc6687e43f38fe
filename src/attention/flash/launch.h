// The launch of a flash kernel.
#pragma once

#include "attention/flash/params.h"
#include "attention/flash/plan.h"
#include "runtime/node.h"

#include <mlx/stream.h>

namespace mlx_cuda {

struct FlashOperands {
  mx::array q;  // [B, H, T, D], or [total, H, D] of packed sequences
  mx::array k;
  mx::array v;
  MaybeArray mask;  // [B, H, Tq, Tk]
};

// An additive mask that TMA can load: itself or, if its rows can be aligned to 16 bytes, a copy without its broadcast dimensions.
// Otherwise the mask, which general kernels read.
mx::array copyable_bias(const mx::array& mask, CommandEncoder& encoder, const mx::Stream& stream);

// Adds the kernel's node. The caller has filled `params`, except `section` and `cap`, and has set inputs and outputs.
void launch_flash(const FlashPlan& plan, FlashParams params, const FlashOperands& operands, KernelNode& node);

}  // namespace mlx_cuda
