// The kernels of small-M GEMM with quantised weights: which of them computes a call, and their nodes.
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

// The one that computes x @ w^T, or without `transpose` x @ w, where the operands lie as they do; what is not evaluated yet counts
// as lying row after row. `pairs`: how many products of a matrix of x and one of w, where indices name them. `small`: MLX's, where
// it reads them.
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
