// Whether MLX is inside what captures of steps take it for (runtime/mlx_internals.h).
#pragma once

#include "runtime/arrays.h"

#include <mlx/stream.h>

#include <string>

namespace mlx_cuda {

// Why steps cannot be captured in this process; empty if they can. Three known nodes are captured, checked and run once; a GPU
// without free memory is a CaptureError, and is tested again. Launches the work of the stream.
std::string capture_refusal(const mx::Stream& stream);

}  // namespace mlx_cuda
