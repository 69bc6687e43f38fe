// MLX's arrays, as the operands and results of primitives.
#pragma once

#include <mlx/array.h>

#include <vector>

namespace mlx_cuda {

namespace mx = mlx::core;

using Arrays = std::vector<mx::array>;

}  // namespace mlx_cuda
