// The part of MLX's graph that a call adds to it, from its arguments to its results, kept to be added again for other arrays.
#pragma once

#include "runtime/arrays.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <variant>
#include <vector>

namespace mlx_cuda {

// Whether it is a primitive of mlx-cuda. MLX's operations build their nodes by the current transformation (gradients, shapeless
// compilation), and arguments show only that there is one.
bool is_own(const mx::Primitive& primitive);

class Graph {
 public:
  using ArrayPointers = std::vector<const mx::array*>;
  using Place = std::uint32_t;  // of the arguments in their order, and of the results of the steps after them

  // The steps from arguments to results that are not evaluated, without those that only define gradients. Empty if there are more
  // than are worth keeping, or if arguments are transformed (`traced`) and some steps are MLX's.
  static std::optional<Graph> between(const ArrayPointers& arguments, const ArrayPointers& results, bool traced);

  // Whether at most one step reads these arguments (bit i: argument i), and it reads others too. Steps that cast or copy one of
  // them have its shape.
  bool one_step_reads(std::uint64_t arguments) const;

  // Whether each of the first values, which are the arguments, is an input of a step or a result. Python may have read the others'
  // numbers, as of an array that is an option.
  bool uses_all(std::size_t arguments) const;

  // The same for other arguments of equal shapes and dtypes: `values` holds them, and then all that is made, which `made` owns.
  void repeat(ArrayPointers& values, Arrays& made) const;

  // The results' indices among these values.
  const std::vector<Place>& results() const {
    return results_;
  }

 private:
  struct Node {
    std::vector<mx::Shape> shapes;  // of its outputs
    std::vector<mx::Dtype> dtypes;
    std::shared_ptr<mx::Primitive> primitive;
    std::vector<Place> inputs;
  };
  using Step = std::variant<mx::array, Node>;  // a constant, or something to compute

  std::optional<Place> place(const mx::array& wanted, bool traced, std::size_t depth = 0);

  std::unordered_map<std::uintptr_t, Place> places_{};  // while it is made
  std::vector<Step> steps_{};
  std::vector<Place> results_{};
  std::size_t outputs_ = 0;  // of all nodes
};

}  // namespace mlx_cuda
