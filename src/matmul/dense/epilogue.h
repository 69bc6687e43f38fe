// The epilogue of a GEMM for which cuBLASLt has no fused one.
#pragma once

#include "device/activation.h"
#include "runtime/arrays.h"

#include <mlx/backend/cuda/device.h>

namespace mlx_cuda {

// out = activation(out + bias) in place, and the activation's argument in `inside`, unless that is null. All row-contiguous and
// of one dtype: float16, bfloat16 or float32.
void encode_epilogue(mx::array& out, mx::array* inside, const MaybeArray& bias, Activation activation, CommandEncoder& encoder);

// out = gemm * scale_a[row] * scale_b[column] + bias. `gemm` is a float32 workspace, whose writing has been named as that of
// `out`; a scale of one element is one for all, and none is 1.
void encode_scaling(
    const void* gemm,
    mx::array& out,
    const MaybeArray& scale_a,
    const MaybeArray& scale_b,
    const MaybeArray& bias,
    CommandEncoder& encoder);

}  // namespace mlx_cuda
