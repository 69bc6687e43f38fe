#include "matmul/grouped/bilinear.h"

#include <mlx/ops.h>

namespace mlx_cuda {

std::vector<mx::array> Bilinear::jvp(
    const std::vector<mx::array>& primals, const std::vector<mx::array>& tangents, const std::vector<int>& argnums) {
  std::vector<mx::array> terms;
  for (std::size_t i = 0; i < argnums.size(); ++i) {
    if (argnums[i] < 2) {
      std::vector<mx::array> inputs = primals;
      inputs[argnums[i]] = tangents[i];
      terms.push_back(apply(inputs));
    }
  }
  if (terms.empty()) {
    return {mx::zeros_like(apply(primals), queue())};
  }
  return {terms.size() == 1 ? terms[0] : mx::add(terms[0], terms[1], queue())};
}

std::vector<mx::array> Bilinear::vjp(
    const std::vector<mx::array>& primals,
    const std::vector<mx::array>& cotangents,
    const std::vector<int>& argnums,
    const std::vector<mx::array>&) {
  std::vector<mx::array> gradients;
  for (const int argnum : argnums) {
    gradients.push_back(
        argnum == 0   ? first_gradient(primals, cotangents[0])
        : argnum == 1 ? second_gradient(primals, cotangents[0])
                      : mx::zeros_like(primals[argnum], queue()));
  }
  return gradients;
}

std::pair<std::vector<mx::array>, std::vector<int>> Bilinear::vmap(
    const std::vector<mx::array>& inputs, const std::vector<int>& axes) {
  return vmap_in_turn(inputs, axes, [this](const std::vector<mx::array>& own) { return apply(own); }, queue());
}

}  // namespace mlx_cuda
