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

// The arrays, and after them those of the others that are there.
Arrays joined(Arrays arrays, const auto&... others) {
  const auto add = [&](const MaybeArray& other) {
    if (other) {
      arrays.push_back(*other);
    }
  };
  (add(others), ...);
  return arrays;
}

}  // namespace mlx_cuda
