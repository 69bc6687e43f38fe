// Primitives that are linear in each of their first two inputs; the others say where things are.
#pragma once

#include "runtime/fused.h"

#include <utility>
#include <vector>

namespace mlx_cuda {

class Bilinear : public Fused {
 public:
  using Fused::Fused;

  std::vector<mx::array> jvp(
      const std::vector<mx::array>& primals, const std::vector<mx::array>& tangents, const std::vector<int>& argnums) final;

  // One element of the batch after another.
  std::pair<std::vector<mx::array>, std::vector<int>> vmap(
      const std::vector<mx::array>& inputs, const std::vector<int>& axes) final;

 protected:
  // The same operation on other inputs.
  virtual mx::array apply(const std::vector<mx::array>& inputs) const = 0;

  std::vector<mx::array> compose(const std::vector<mx::array>& inputs) const final {
    return {apply(inputs)};
  }
};

}  // namespace mlx_cuda
