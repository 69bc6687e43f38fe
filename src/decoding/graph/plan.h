// The computation of a captured step: the part of MLX's graph that depends on its inputs, as items that fusion can replace.
#pragma once

#include "runtime/arrays.h"

#include <mlx/stream.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

namespace mlx_cuda {

// The names of the primitives of a step's inputs, and of all-reduces (all_sum/all_sum.h).
inline constexpr const char* kStepInput = "StepInput";
inline constexpr const char* kAllSum = "AllSum";

// Something that gives arrays from others: a primitive of MLX's graph, or what replaces several.
struct Item {
  std::string name;
  Arrays inputs;
  Arrays outputs;
  std::function<void(const mx::Stream&)> run;  // adds its kernels to the stream's encoder
};

class Plan {
 public:
  // The primitives that lead to a result. They run on the given stream, whatever stream they were made for.
  explicit Plan(const mx::array& result);

  const mx::array& result() const {
    return result_;
  }
  // Arrays that they use and that depend on no input of the step: computed once.
  const Arrays& constants() const {
    return constants_;
  }
  // The primitives, and what was added to them, in the order in which they were found.
  const std::deque<Item>& items() const {
    return items_;
  }
  // The item that computes an array now; null if the array depends on no input.
  const Item* giver(const mx::array& of) const;
  // The items that read it.
  const std::vector<const Item*>& readers(const mx::array& of) const;

  // Makes a new item compute its outputs, instead of the former ones.
  void replace(Item item);

  // The items that the result needs, in topological order.
  std::vector<const Item*> order() const;

 private:
  mx::array result_;
  Arrays constants_{};
  std::deque<Item> items_{};  // which stay where they are
  std::unordered_map<std::uintptr_t, const Item*> givers_{};
  std::unordered_map<std::uintptr_t, std::vector<const Item*>> readers_{};
};

}  // namespace mlx_cuda
