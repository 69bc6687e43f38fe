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

std::pair<std::vector<mx::array>, std::vector<int>> Bilinear::vmap(
    const std::vector<mx::array>& inputs, const std::vector<int>& axes) {
  int count = 0;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    count = axes[i] < 0 ? count : inputs[i].shape(axes[i]);
  }
  std::vector<mx::array> results;
  for (int element = 0; element < count; ++element) {
    std::vector<mx::array> own;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      own.push_back(axes[i] < 0 ? inputs[i] : mx::take(inputs[i], element, axes[i], queue()));
    }
    results.push_back(apply(own));
  }
  return {{mx::stack(results, 0, queue())}, {0}};
}

}  // namespace mlx_cuda
