#include "decoding/capture/lifetimes.h"

#include "runtime/mlx_internals.h"

#include <algorithm>
#include <unordered_map>

namespace mlx_cuda {

void Lifetimes::add(const mx::array& array) {
  arrays_.emplace_back(array.id(), lifetime_of(array));
}

bool Lifetimes::any_left(const std::vector<const mx::array*>& known) const {
  return std::any_of(arrays_.begin(), arrays_.end(), [&](const auto& each) {
    return !each.second.expired() &&
           std::none_of(known.begin(), known.end(), [&](const mx::array* array) { return array->id() == each.first; });
  });
}

Lifetimes lifetimes_between(const mx::array& input, const mx::array& result) {
  Lifetimes found;
  std::unordered_map<std::uintptr_t, bool> depends{{input.id(), true}};
  std::vector<std::pair<mx::array, bool>> stack{{result, false}};  // whether its inputs have been seen
  while (!stack.empty()) {
    const mx::array array = stack.back().first;
    if (depends.contains(array.id())) {
      stack.pop_back();
    } else if (!array.has_primitive() || array.status() != mx::array::Status::unscheduled) {
      depends[array.id()] = false;
    } else if (!stack.back().second) {
      stack.back().second = true;
      for (const mx::array& in : array.inputs()) {
        stack.emplace_back(in, false);
      }
    } else {
      const auto& inputs = array.inputs();
      const bool does = std::any_of(inputs.begin(), inputs.end(), [&](const mx::array& in) { return depends.at(in.id()); });
      for (const mx::array& out : array.outputs()) {
        depends[out.id()] = does;
        if (does) {
          found.add(out);
        }
      }
    }
  }
  return found;
}

}  // namespace mlx_cuda
