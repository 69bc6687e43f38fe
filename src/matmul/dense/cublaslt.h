// GEMMs by cuBLASLt, with bias and activation as its epilogue if it has one.
#pragma once

#include "device/activation.h"
#include "runtime/memory.h"

#include <cublasLt.h>

#include <cstdint>
#include <memory>
#include <optional>

namespace mlx_cuda {

// How FP8 operands are scaled, with the values of cublasLtMatmulMatrixScale_t: CUDA 12.8's headers have the first only, and a
// library that does not know the others has no algorithm for them.
enum class Scaling : std::int32_t {
  tensor = 0,  // one float32
  rows = 3,    // one for each row
  blocks = 4,  // one for each row and 128 columns, those of all rows together: [ceil(inner / 128), rows]
  tiles = 5,   // one for each 128 x 128: [ceil(rows / 128), ceil(inner / 128) rounded up to 4]
};

// out [rows, columns] = activation(x [rows, inner] @ w [columns, inner]^T + bias [columns]), everything row-major. Leading
// dimensions are in elements. The defaults are a plain GEMM.
struct MatmulProblem {
  mx::Dtype dtype;      // of x and w: float32, float16, bfloat16, or uint8 for FP8 (e4m3)
  mx::Dtype out_dtype;  // of out, bias and inside
  std::int64_t rows, columns, inner;
  std::int64_t x_stride, w_stride, out_stride;
  bool x_transposed = false;  // x is stored as [inner, rows]
  bool w_transposed = false;  // w is stored as [inner, columns]
  bool has_bias = false;
  bool keeps_inside = false;  // also writes the activation's argument, [rows, columns]
  Activation activation = Activation::none;
  Scaling x_scaling = Scaling::tensor;  // of FP8
  Scaling w_scaling = Scaling::tensor;
};

struct MatmulPointers {
  const void* x;
  const void* w;
  void* out;
  const void* bias = nullptr;
  void* inside = nullptr;
  const void* x_scale = nullptr;  // float32, of FP8; null is 1
  const void* w_scale = nullptr;
};

struct MatmulPlan;

// A GEMM with its algorithm and its workspace.
struct ReadyMatmul {
  std::shared_ptr<MatmulPlan> plan;
  MatmulPointers pointers;
  void* workspace;
};

// None when cuBLASLt has no algorithm for it. It allocates, so it comes before the caller names the inputs and outputs of the node;
// the algorithm is looked for once for each problem and alignment.
std::optional<ReadyMatmul> prepare_matmul(
    const MatmulProblem& problem, const MatmulPointers& pointers, CommandEncoder& encoder, const mx::Stream& stream);

// Adds the GEMM to the graph, after its inputs and outputs have been set.
void encode_matmul(const ReadyMatmul& matmul, CommandEncoder& encoder);

// Whether cuBLASLt has an algorithm if every operand is aligned to 256 bytes.
bool can_matmul(const MatmulProblem& problem, mx::cu::Device& device);

}  // namespace mlx_cuda
