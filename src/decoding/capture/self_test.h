// Whether MLX is inside what captures of steps take it for (runtime/mlx_internals.h).
#pragma once

#include "runtime/arrays.h"

#include <mlx/stream.h>

#include <string>

namespace mlx_cuda {

// Why no step is captured in this process, in words; empty where steps are. Three known nodes are captured, looked at and run once;
// a GPU that is full then is a CaptureError, and is asked again. Launches what the stream has.
std::string capture_refusal(const mx::Stream& stream);

}  // namespace mlx_cuda
