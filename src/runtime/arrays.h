// Names of MLX's that all files have: arrays as the operands and results of primitives, and who encodes their kernels.
#pragma once

#include <mlx/array.h>

#include <optional>
#include <vector>

namespace mlx::core::cu {
class CommandEncoder;
}

namespace mlx_cuda {

namespace mx = mlx::core;

using mx::cu::CommandEncoder;
using Arrays = std::vector<mx::array>;
using MaybeArray = std::optional<mx::array>;

}  // namespace mlx_cuda
