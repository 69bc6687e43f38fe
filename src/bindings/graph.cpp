#include "bindings/graph.h"

#include <mlx/primitives.h>

#include <cstddef>
#include <cstring>
#include <utility>

namespace mlx_cuda {

namespace {

constexpr std::size_t kMostSteps = 64;

// What only says how a derivative is taken, and has the value of its last input.
bool passes_on(const mx::array& in) {
  if (!in.has_primitive() || !in.siblings().empty()) {
    return false;
  }
  const char* name = in.primitive().name();
  return std::strcmp(name, "CustomTransforms") == 0 || std::strcmp(name, "StopGradient") == 0;
}

}  // namespace

std::optional<Graph> Graph::between(const std::vector<const mx::array*>& arguments, const mx::array& result) {
  Graph graph;
  for (const auto* argument : arguments) {
    if (!graph.places_.emplace(argument->id(), static_cast<Place>(graph.places_.size())).second) {
      return std::nullopt;
    }
  }
  if (!result.has_primitive()) {
    return std::nullopt;
  }
  const auto place = graph.place(result);
  if (!place) {
    return std::nullopt;
  }
  graph.result_ = *place;
  graph.places_.clear();
  return graph;
}

std::optional<Graph::Place> Graph::place(const mx::array& wanted) {
  const mx::array* in = &wanted;
  auto known = places_.find(in->id());
  while (known == places_.end() && passes_on(*in)) {
    in = &in->inputs().back();
    known = places_.find(in->id());
  }
  if (known != places_.end()) {
    return known->second;
  }
  if (!in->siblings().empty()) {
    return std::nullopt;
  }
  if (in->has_primitive()) {
    Node node{in->shape(), in->dtype(), in->primitive_ptr(), {}};
    for (const auto& input : in->inputs()) {
      const auto place = this->place(input);
      if (!place) {
        return std::nullopt;
      }
      node.inputs.push_back(*place);
    }
    steps_.emplace_back(std::move(node));
  } else {
    steps_.emplace_back(*in);
  }
  if (steps_.size() > kMostSteps) {
    return std::nullopt;
  }
  const auto place = static_cast<Place>(places_.size());
  places_.emplace(in->id(), place);
  return place;
}

mx::array Graph::repeat(std::vector<const mx::array*> arguments) const {
  std::vector<const mx::array*>& values = arguments;
  std::vector<mx::array> made;
  made.reserve(steps_.size());  // so that they stay where they are
  for (const auto& step : steps_) {
    if (const auto* constant = std::get_if<mx::array>(&step)) {
      values.push_back(constant);
      continue;
    }
    const Node& node = std::get<Node>(step);
    std::vector<mx::array> inputs;
    inputs.reserve(node.inputs.size());
    for (const Place place : node.inputs) {
      inputs.push_back(*values[place]);
    }
    made.emplace_back(node.shape, node.dtype, node.primitive, std::move(inputs));
    values.push_back(&made.back());
  }
  return *values[result_];
}

}  // namespace mlx_cuda
