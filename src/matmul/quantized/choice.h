// The kernels of small-M GEMM with quantized weights: the choice of one for a call, and their nodes.
#pragma once

#include "matmul/quantized/weights.h"

#include <mlx/array.h>
#include <mlx/backend/cuda/device.h>

#include <optional>
#include <string>

namespace mlx_cuda {

enum class SmallMEngine {
  upstream,  // MLX's own
  sm90,      // quantized_sm90.cu: many rows for a kernel that reads weights once, on Hopper
  moe,       // quantized_moe_sm90.cu: single rows that name experts, on Hopper
  small_m,   // quantized_small_m.cu
  plain,     // quantized_plain.cu: without tensor cores
};

struct SmallMKernel {
  SmallMEngine engine;
  int tile = 0;             // rows of x that a block takes
  std::string source = {};  // of the device code; none: MLX's
  std::string name = {};
};

// The kernel for x @ w^T, or without `transpose` x @ w, with the operands' layouts; arrays that are not evaluated count as
// row-contiguous. `pairs`: the number of matmuls of a matrix of x and one of w, if there are indices. `small`: MLX's kernel, if
// it can read the operands.
SmallMKernel choose_small_m(
    const mx::array& x, const QuantizedWeights& weights, std::optional<int> pairs, bool transpose, bool small);

// A call on its way to its kernel: operands in memory that it reads, and a result that has memory.
struct SmallMCall {
  SmallMKernel kernel;
  mx::array x;
  Readable in;
  MaybeArray lhs;
  MaybeArray rhs;
  mx::array& out;
  bool transpose;
  int rows;  // of each matrix of x
  int batches;
  CommandEncoder& encoder;
  mx::Stream stream;
};

// Adds its node, or nodes; not for upstream.
void encode_small_m(const SmallMCall& call);

// Experts that are different, of `pairs` of a row and an expert, if experts are named at random: a fraction.
double different_experts(int pairs, int experts);

}  // namespace mlx_cuda
