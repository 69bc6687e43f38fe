// Matrix products through cuBLASLt, with the bias and the activation fused where the library can.
#pragma once

#include "runtime/memory.h"

#include <cublasLt.h>

#include <cstddef>
#include <cstdint>

namespace mlx_cuda {

enum class Activation { none, relu, gelu_approx };

// out [rows, columns] = activation(x [rows, inner] @ w [columns, inner]^T + bias [columns]), everything row-major and of one dtype.
// `w_transposed` says that w lies in memory as [inner, columns]. Leading dimensions are in elements.
struct LinearProblem {
  mx::Dtype dtype;
  std::int64_t rows, columns, inner;
  std::int64_t x_stride, w_stride;
  bool w_transposed;
  bool has_bias;
  Activation activation;
};

// Encodes the product of arrays that have memory. Returns false, with nothing encoded, when cuBLASLt has no algorithm for it. The
// heuristic is asked once for each problem and alignment. `bias` is null without a bias.
bool encode_linear(
    const LinearProblem& problem,
    const mx::array& x,
    const mx::array& w,
    const mx::array* bias,
    mx::array& out,
    mx::cu::CommandEncoder& encoder,
    const mx::Stream& stream);

}  // namespace mlx_cuda
