// Gated activations, which models write in many ways: recognized by evaluating the plan's function.
#pragma once

#include "decoding/graph/plan.h"
#include "matmul/gemv/params.h"

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>

namespace mlx_cuda {

// activation(gate) * up.
struct Gate {
  GemvEpilogue activation;
  mx::array gate;
  mx::array up;
  mx::array out;
};

class Gates {
 public:
  explicit Gates(const Plan& plan) : plan_(plan) {}

  // The gate whose `up` it is, if nothing else reads either of them. `known` returns whether the two arrays are worth a try.
  std::optional<Gate> read_by(const mx::array& up, const std::function<bool(const mx::array&, const mx::array&)>& known);

  // Whether this is silu, of one array.
  bool is_silu(const Item& item);

 private:
  const Plan& plan_;
  std::map<std::string, std::optional<std::pair<GemvEpilogue, bool>>> tried_{};  // by its function
  std::map<std::string, bool> silu_{};
};

}  // namespace mlx_cuda
