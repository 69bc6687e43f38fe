// Which decode kernel takes a call, and how it is launched.
#pragma once

#include "attention/decode/params.h"
#include "runtime/device_code.h"

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace mlx_cuda {

// What a call is like beyond the sizes that its parameters have.
struct DecodeTraits {
  bool mask;
  bool one_mask;  // one row of a bool mask for all heads: what it hides is not read
  bool ragged;    // keys begin or end at different places
  bool copyable;  // by the copy engine of this GPU, which is Hopper
};

struct DecodePlan {
  KernelModule* module = nullptr;
  std::string family{};  // the kernel's name before the dtype
  std::string kernel{};  // and after it
  dim3 grid{};
  int warps = 0;
  int shared = 0;           // bytes
  int resident = 1;         // blocks of a multiprocessor
  bool whole = false;       // each block takes a whole unit
  int maps = 0;             // rows of the boxes in which keys and values are copied; 0: the kernel takes none
  std::size_t slots = 0;    // rows of incomplete results that there may be
  std::size_t tickets = 0;  // units whose parts are counted; 0: a kernel of its own merges incomplete results
};

// Fills in how the work is shared. `params` has the sizes, options and strides.
DecodePlan plan_decode(DecodeParams& params, const DecodeTraits& traits);

// The kernel that merges what is not merged by tickets, for a block of how many threads for each query of each head.
CUfunction decode_merge(const std::string& dtype);
int decode_merge_threads(const DecodeParams& params);

}  // namespace mlx_cuda
