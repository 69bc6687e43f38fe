// Primitives with one result that is linear in each of their first two inputs; the others say where things are.
#pragma once

#include "runtime/fused.h"

#include <mlx/ops.h>

namespace mlx_cuda {

class Bilinear : public Fused {
 public:
  using Fused::Fused;

  Arrays jvp(const Arrays& primals, const Arrays& tangents, const std::vector<int>& argnums) final {
    Arrays terms;
    for (std::size_t i = 0; i < argnums.size(); ++i) {
      if (argnums[i] < 2) {
        Arrays inputs = primals;
        inputs[argnums[i]] = tangents[i];
        terms.push_back(apply(inputs));
      }
    }
    if (terms.empty()) {
      return {mx::zeros_like(apply(primals), queue())};
    }
    return {terms.size() == 1 ? terms[0] : mx::add(terms[0], terms[1], queue())};
  }

  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums, const Arrays&) final {
    Arrays gradients;
    for (const int argnum : argnums) {
      gradients.push_back(
          argnum == 0   ? first_gradient(primals, cotangents[0])
          : argnum == 1 ? second_gradient(primals, cotangents[0])
                        : mx::zeros_like(primals[argnum], queue()));
    }
    return gradients;
  }

  std::pair<Arrays, std::vector<int>> vmap(const Arrays& inputs, const std::vector<int>& axes) final {
    return vmap_in_turn(inputs, axes, [this](const Arrays& own) { return apply(own); }, queue());
  }

 protected:
  // The same operation on other inputs.
  virtual mx::array apply(const Arrays& inputs) const = 0;

  // With respect to each of the first two inputs.
  virtual mx::array first_gradient(const Arrays& primals, const mx::array& cotangent) const = 0;
  virtual mx::array second_gradient(const Arrays& primals, const mx::array& cotangent) const = 0;
  bool is_composable() const final {
    return false;
  }

  Arrays compose(const Arrays& inputs) const final {
    return {apply(inputs)};
  }
};

}  // namespace mlx_cuda
