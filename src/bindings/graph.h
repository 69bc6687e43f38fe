// The part of MLX's graph that a call adds to it, from its arguments to its result, kept to be added again for other arrays.
#pragma once

#include <mlx/array.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <variant>
#include <vector>

namespace mlx_cuda {

namespace mx = mlx::core;

class Graph {
 public:
  // What leads to a result that is not evaluated; no derivative is asked of it. Nothing where that cannot be told of others:
  // arguments that are one array, primitives of several results, more steps than are worth keeping.
  static std::optional<Graph> between(const std::vector<const mx::array*>& arguments, const mx::array& result);

  // The result for other arguments of the same shapes and dtypes.
  mx::array repeat(std::vector<const mx::array*> arguments) const;

 private:
  using Place = std::uint32_t;  // of the arguments in their order, and of the steps after them

  struct Node {
    mx::Shape shape;
    mx::Dtype dtype;
    std::shared_ptr<mx::Primitive> primitive;
    std::vector<Place> inputs;
  };
  using Step = std::variant<mx::array, Node>;  // a constant, or something to compute

  std::optional<Place> place(const mx::array& wanted);

  std::unordered_map<std::uintptr_t, Place> places_{};  // while it is made
  std::vector<Step> steps_{};
  Place result_ = 0;
};

}  // namespace mlx_cuda
