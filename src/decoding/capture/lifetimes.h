// Whether any of many arrays is still in use.
#pragma once

#include "runtime/arrays.h"

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace mlx_cuda {

class Lifetimes {
 public:
  void add(const mx::array& array);
  // Besides those who have these.
  bool any_left(const std::vector<const mx::array*>& known = {}) const;

 private:
  std::vector<std::pair<std::uintptr_t, std::weak_ptr<const void>>> arrays_{};  // their ids, and weak references to their memory
};

// The arrays that a result is to be computed from, and that depend on this input.
Lifetimes lifetimes_between(const mx::array& input, const mx::array& result);

}  // namespace mlx_cuda
