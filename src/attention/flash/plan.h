// Which flash kernel a call gets.
#pragma once

#include "attention/flash/kernels.h"
#include "runtime/arrays.h"

#include <mlx/dtype.h>

#include <optional>
#include <string>

namespace mlx_cuda {

// The properties of a call that choose the kernel.
struct FlashCall {
  mx::Dtype dtype;
  int head_dim;
  int v_head_dim;
  bool masked = false;
  bool biased = false;  // by an additive mask that the copy engine reads
  bool softcap = false;
  bool sinks = false;
  bool lse = false;
};

struct FlashPlan {
  const char* source;  // "flash" or "flash_sm90"
  std::string kernel;
  FlashKind kind;  // of flash_sm90
  int rows;        // of queries, that a block takes at a time
  int keys;        // of a tile
  int threads;
  int shared_bytes;
};

// Whether this GPU has the kernels of flash_sm90.cu and they are for such operands, of which the copy engine then reads all.
bool on_flash_sm90(const FlashCall& call);

// Whether kernels with tiles of an additive mask in their stages support the call; they have no registers for other options.
bool takes_bias(const FlashCall& call);

// None where no kernel takes such operands.
std::optional<FlashPlan> plan_flash(const FlashCall& call);

}  // namespace mlx_cuda
