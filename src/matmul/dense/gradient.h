// The part of a linear layer's backward pass between its two GEMMs.
#pragma once

#include "matmul/dense/cublaslt.h"

#include <mlx/array.h>
#include <mlx/stream.h>

namespace mlx_cuda {

struct LinearGradient {
  mx::array inner;  // with respect to x @ w.T + bias, of the shape of `outer`
  MaybeArray bias;  // its sum over all but the last dimension
};

// An array [..., N] as a matrix.
mx::array as_matrix(const mx::array& in, const mx::Stream& stream);

// `outer` [..., N] is the gradient of the layer's result; `saved`, of the same shape, that result for relu, what gelu_approx was
// applied to, and is not looked at without an activation. All of one dtype (float16, bfloat16 or float32), no dimension empty.
LinearGradient linear_gradient(
    const mx::array& outer, const mx::array& saved, Activation activation, bool with_bias, const mx::Stream& stream);

}  // namespace mlx_cuda
