#pragma once

#include "runtime/fused.h"

namespace mlx_cuda {

// silu(gate) * up, elementwise. Both have the same shape and dtype (float16, bfloat16 or float32) and at least one element.
mx::array swiglu(const mx::array& gate, const mx::array& up, const mx::Stream& stream);

}  // namespace mlx_cuda
