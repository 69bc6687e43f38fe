// Primitives with one result that is linear in each of their first two inputs; the others say where things are.
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
  std::vector<mx::array> vjp(
      const std::vector<mx::array>& primals,
      const std::vector<mx::array>& cotangents,
      const std::vector<int>& argnums,
      const std::vector<mx::array>& outputs) final;
  std::pair<std::vector<mx::array>, std::vector<int>> vmap(
      const std::vector<mx::array>& inputs, const std::vector<int>& axes) final;

 protected:
  // The same operation on other inputs.
  virtual mx::array apply(const std::vector<mx::array>& inputs) const = 0;

  // With respect to each of the first two inputs.
  virtual mx::array first_gradient(const std::vector<mx::array>& primals, const mx::array& cotangent) const = 0;
  virtual mx::array second_gradient(const std::vector<mx::array>& primals, const mx::array& cotangent) const = 0;

  std::vector<mx::array> compose(const std::vector<mx::array>& inputs) const final {
    return {apply(inputs)};
  }
};

}  // namespace mlx_cuda
