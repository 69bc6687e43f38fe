#include "bindings/graph.h"

#include <mlx/primitives.h>

#include <algorithm>
#include <string_view>
#include <utility>

namespace mlx_cuda {

namespace {

constexpr std::size_t kMostSteps = 64;

// The input whose value this array has, if the array only defines a gradient.
const mx::array* passed_on(const mx::array& in) {
  if (!in.has_primitive()) {
    return nullptr;
  }
  const std::string_view name = in.primitive().name();
  if (name != "CustomTransforms" && name != "StopGradient") {
    return nullptr;
  }
  return &in.inputs()[in.inputs().size() - 1 - in.siblings().size() + in.sibling_position()];
}

}  // namespace

std::optional<Graph> Graph::between(const ArrayPointers& arguments, const ArrayPointers& results, bool traced) {
  Graph graph;
  for (const auto* argument : arguments) {
    graph.places_.emplace(argument->id(), static_cast<Place>(graph.places_.size()));
  }
  for (const auto* result : results) {
    const auto place = result->has_primitive() ? graph.place(*result, traced) : std::nullopt;
    if (!place) {
      return std::nullopt;
    }
    graph.results_.push_back(*place);
  }
  graph.places_.clear();
  return graph;
}

std::optional<Graph::Place> Graph::place(const mx::array& wanted, bool traced, std::size_t depth) {
  if (depth > kMostSteps) {  // before the stack ends
    return std::nullopt;
  }
  const mx::array* in = &wanted;
  while (!places_.contains(in->id())) {
    const mx::array* input = traced ? nullptr : passed_on(*in);
    if (!input) {
      break;
    }
    in = input;
  }
  if (const auto known = places_.find(in->id()); known != places_.end()) {
    return known->second;
  }
  if (!in->has_primitive()) {
    if (in->is_tracer()) {
      return std::nullopt;
    }
    steps_.emplace_back(*in);
    return places_.emplace(in->id(), static_cast<Place>(places_.size())).first->second;
  }
  if (traced && !is_own(in->primitive())) {
    return std::nullopt;
  }
  Node node{{}, {}, in->primitive_ptr(), {}};
  for (const auto& input : in->inputs()) {
    const auto place = this->place(input, traced, depth + 1);
    if (!place) {
      return std::nullopt;
    }
    node.inputs.push_back(*place);
  }
  for (const auto& output : in->outputs()) {
    node.shapes.push_back(output.shape());
    node.dtypes.push_back(output.dtype());
    places_.emplace(output.id(), static_cast<Place>(places_.size()));
  }
  outputs_ += node.shapes.size();
  steps_.emplace_back(std::move(node));
  return steps_.size() > kMostSteps ? std::nullopt : std::optional(places_.at(in->id()));
}

bool Graph::one_step_reads(std::uint64_t arguments) const {
  auto is_one = [&](Place place) { return place < 64 && ((arguments >> place) & 1) != 0; };
  std::size_t readers = 0;
  for (const auto& step : steps_) {
    const auto* node = std::get_if<Node>(&step);
    if (node && std::any_of(node->inputs.begin(), node->inputs.end(), is_one)) {
      if (++readers > 1 || std::all_of(node->inputs.begin(), node->inputs.end(), is_one)) {
        return false;
      }
    }
  }
  return true;
}

bool Graph::uses_all(std::size_t arguments) const {
  std::vector<bool> used(arguments);
  auto use = [&](const std::vector<Place>& places) {
    for (const Place place : places) {
      if (place < arguments) {
        used[place] = true;
      }
    }
  };
  use(results_);
  for (const auto& step : steps_) {
    if (const auto* node = std::get_if<Node>(&step)) {
      use(node->inputs);
    }
  }
  return std::find(used.begin(), used.end(), false) == used.end();
}

void Graph::repeat(ArrayPointers& values, Arrays& made) const {
  made.reserve(outputs_);  // so that they stay where they are
  for (const auto& step : steps_) {
    if (const auto* constant = std::get_if<mx::array>(&step)) {
      values.push_back(constant);
      continue;
    }
    const Node& node = std::get<Node>(step);
    Arrays inputs;
    inputs.reserve(node.inputs.size());
    for (const Place place : node.inputs) {
      inputs.push_back(*values[place]);
    }
    if (node.shapes.size() == 1) {
      made.emplace_back(node.shapes[0], node.dtypes[0], node.primitive, std::move(inputs));
      values.push_back(&made.back());
      continue;
    }
    for (mx::array& output : mx::array::make_arrays(node.shapes, node.dtypes, node.primitive, inputs)) {
      made.push_back(std::move(output));
      values.push_back(&made.back());
    }
  }
}

}  // namespace mlx_cuda
