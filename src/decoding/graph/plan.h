// What a captured step computes: the part of MLX's graph that depends on its inputs, in pieces that others may take the place of.
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

// The name of the primitives that give a step its inputs, and of sums over GPUs (all_sum/all_sum.h).
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
  // The primitives that lead to a result. They run on the stream that they are told, whatever they were made for.
  explicit Plan(const mx::array& result);

  const mx::array& result() const {
    return result_;
  }
  // What they use that depends on no input of the step: it is computed once.
  const Arrays& constants() const {
    return constants_;
  }
  // The primitives, and what was added to them, in the order in which they were found.
  const std::deque<Item>& items() const {
    return items_;
  }
  // What gives an array at present; null if that depends on no input.
  const Item* giver(const mx::array& of) const;
  // What reads it, of the primitives.
  const std::vector<const Item*>& readers(const mx::array& of) const;

  // Has a new item give its outputs, in place of what gave them before.
  void replace(Item item);

  // What is needed for the result, each after what it needs itself.
  std::vector<const Item*> order() const;

 private:
  mx::array result_;
  Arrays constants_{};
  std::deque<Item> items_{};  // which stay where they are
  std::unordered_map<std::uintptr_t, const Item*> givers_{};
  std::unordered_map<std::uintptr_t, std::vector<const Item*>> readers_{};
};

}  // namespace mlx_cuda
