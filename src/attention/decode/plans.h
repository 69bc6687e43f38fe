// Chooses the decode kernel of a call and its launch parameters.
#pragma once

#include "attention/decode/params.h"
#include "runtime/device_code.h"

#include <cuda_runtime.h>
#include <mlx/dtype.h>

#include <cstddef>
#include <string>

namespace mlx_cuda {

// The properties of a call that choose the kernel and its work, besides the GPU.
struct DecodeProblem {
  mlx::core::Dtype dtype;
  DecodeSizes sizes;
  bool paged;          // paged KV cache
  bool mask;           // an array
  bool key_mask;       // and one row of booleans for all heads: masked keys are not read
  bool ragged;         // sequences have different first or last keys
  bool copyable;       // by the copy engine of this GPU, which is Hopper
  bool shared_values;  // the values are the first columns of the keys
};

// One source of device code each: decode_direct, decode, decode_sm90, decode_wide, decode_quantized.
enum class DecodeEngine { direct, narrow, sm90, wide, quantized };

// Who merges the results of parts of a unit, where there are such.
enum class Merge { none, tickets, kernel };

struct DecodePlan {
  DecodeEngine engine;
  std::string kernel;
  dim3 grid{};
  int warps = 0;
  int shared_bytes = 0;
  DecodeTiling tiling{};
  SplitK split_k{};    // of the direct kernel and of that for quantized keys
  StreamK stream_k{};  // of the others
  int stages = 0;      // of the wide kernel's pipeline
  Merge merge = Merge::none;
  int merge_groups = 1;
  std::size_t partial_rows = 0;  // rows of incomplete results that there may be
  std::size_t tickets = 0;       // units whose parts are counted
};

DecodePlan plan_decode(const DecodeProblem& problem);

// For keys and values of 4 or 8 bits, which are floats or affine.
DecodePlan plan_quantized(const DecodeProblem& problem, bool floats, int bits);

const char* source_of(DecodeEngine engine);
KernelModule& module_of(DecodeEngine engine);

// The kernel that merges for Merge::kernel, a block for each query of each head, and its threads.
CUfunction merge_kernel(mlx::core::Dtype dtype);
int merge_threads(const DecodePlan& plan, int value_dim);

}  // namespace mlx_cuda
