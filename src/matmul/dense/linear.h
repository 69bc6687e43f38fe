#pragma once

#include "matmul/dense/cublaslt.h"
#include "runtime/fused.h"

namespace mlx_cuda {

// activation(x @ w.T + bias): x [..., K], w [N, K], bias [N], all of one dtype (float16, bfloat16 or float32), no dimension empty.
mx::array linear(const mx::array& x, const mx::array& w, const MaybeArray& bias, Activation activation, const mx::Stream& stream);

}  // namespace mlx_cuda
