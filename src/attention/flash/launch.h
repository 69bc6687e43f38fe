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

// An additive mask that the copy engine reads: itself or, where its rows can lie on 16 bytes, a copy without what is broadcast in
// it. Else the mask, as general kernels read it.
mx::array copyable_bias(const mx::array& mask, CommandEncoder& encoder, const mx::Stream& stream);

// Adds the kernel's node; the caller has filled `params` (but for `section` and `cap`) and has named inputs and outputs.
void launch_flash(const FlashPlan& plan, FlashParams params, const FlashOperands& operands, KernelNode& node);

}  // namespace mlx_cuda
