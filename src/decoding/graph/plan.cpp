#include "decoding/graph/plan.h"

#include "runtime/mlx_internals.h"

#include <algorithm>
#include <stdexcept>
#include <string_view>
#include <unordered_set>
#include <utility>

namespace mlx_cuda {

namespace {

// The arrays that an array is computed from. A custom function's primitive also has its arguments as inputs, which only gradients
// read.
Arrays operands(const mx::array& array) {
  const auto& inputs = array.inputs();
  const bool custom = std::string_view(array.primitive().name()) == "CustomTransforms";
  return custom ? Arrays(inputs.end() - static_cast<std::ptrdiff_t>(array.outputs().size()), inputs.end()) : inputs;
}

// Whether it is one of MLX's primitives that other processes take part in.
bool talks(std::string_view name) {
  return name.ends_with("AllReduce") || name.ends_with("ReduceScatter") || name == "AllGather" || name == "Send" || name == "Recv";
}

bool computed(const mx::array& in) {
  return !in.has_primitive() || in.status() != mx::array::Status::unscheduled;
}

void require_on_gpu(mx::Primitive& primitive) {
  if (primitive.stream().device.type != mx::Device::gpu) {
    throw std::invalid_argument("[decode_step] " + std::string(primitive.name()) + " runs on the CPU.");
  }
}

}  // namespace

Plan::Plan(const mx::array& result) : result_(result) {
  struct Visit {
    mx::array array;
    bool entered;
  };
  std::unordered_map<std::uintptr_t, bool> depends;  // on an input, of all that was seen
  std::unordered_set<std::uintptr_t> kept;
  std::vector<Visit> stack{{result, false}};
  while (!stack.empty()) {
    const mx::array array = stack.back().array;
    if (depends.contains(array.id())) {
      stack.pop_back();
      continue;
    }
    if (computed(array)) {
      depends[array.id()] = false;
      continue;
    }
    const auto inputs = operands(array);
    if (!std::exchange(stack.back().entered, true)) {
      for (const mx::array& in : inputs) {
        stack.push_back({in, false});
      }
      continue;
    }
    const std::string_view name = array.primitive().name();
    if (name == "RandomBits") {  // computed once, other numbers would be the same for each token
      throw std::invalid_argument("[decode_step] The model draws random numbers.");
    }
    const bool needed =
        name == kStepInput || std::any_of(inputs.begin(), inputs.end(), [&](const mx::array& in) { return depends.at(in.id()); });
    if (talks(name) || (name == kAllSum && !needed)) {  // a capture is made, and compared, whatever other processes do
      throw std::invalid_argument("[decode_step] The model sends to other processes, by " + std::string(name) + ".");
    }
    for (const mx::array& out : array.outputs()) {
      depends[out.id()] = needed;
    }
    if (!needed) {
      continue;
    }
    require_on_gpu(array.primitive());
    for (const mx::array& in : inputs) {
      if (!depends.at(in.id()) && kept.insert(in.id()).second) {
        constants_.push_back(in);
      }
    }
    // Primitives of a compiled function keep the stream of its first call, and are encoded on another one. No other thread sees
    // that: the rest of them belong to the captured call, and MLX's cache of compiled functions is per thread; a thread that
    // captures is in here, under the lock of capture.py.
    replace({array.primitive().name(), inputs, array.outputs(), [array](const mx::Stream& stream) { encode_on(array, stream); }});
    for (const mx::array& in : inputs) {
      readers_[in.id()].push_back(&items_.back());
    }
  }
  if (items_.empty()) {
    throw std::invalid_argument("[decode_step] The result does not depend on the tokens.");
  }
}

void Plan::replace(Item item) {
  items_.push_back(std::move(item));
  for (const mx::array& out : items_.back().outputs) {
    givers_[out.id()] = &items_.back();
  }
}

const Item* Plan::giver(const mx::array& of) const {
  const auto found = givers_.find(of.id());
  return found == givers_.end() ? nullptr : found->second;
}

const std::vector<const Item*>& Plan::readers(const mx::array& of) const {
  static const std::vector<const Item*> none;
  const auto found = readers_.find(of.id());
  return found == readers_.end() ? none : found->second;
}

std::vector<const Item*> Plan::order() const {
  enum class State { unseen, entered, done };
  std::unordered_map<const Item*, State> states;
  std::vector<const Item*> order;
  std::vector<const Item*> stack{giver(result_)};
  while (!stack.empty()) {
    const Item* item = stack.back();
    State& state = states[item];
    if (state != State::unseen) {
      stack.pop_back();
      if (std::exchange(state, State::done) == State::entered) {
        order.push_back(item);
      }
      continue;
    }
    state = State::entered;
    for (auto in = item->inputs.rbegin(); in != item->inputs.rend(); ++in) {
      const Item* before = giver(*in);
      if (before && states[before] == State::unseen) {
        stack.push_back(before);
      } else if (before && states[before] == State::entered) {
        throw std::logic_error("[decode_step] A fused item depends on itself.");
      }
    }
  }
  return order;
}

}  // namespace mlx_cuda
