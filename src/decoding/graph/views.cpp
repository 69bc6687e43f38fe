#include "decoding/graph/views.h"

#include <mlx/primitives.h>

#include <array>
#include <string>
#include <string_view>

namespace mlx_cuda {

namespace {

// Whether a transposition moves axes of one element only past others.
bool keeps_order(const mx::array& transposed) {
  const auto axes = static_cast<const mx::Transpose&>(transposed.primitive()).state();
  int last = -1;
  for (const int axis : axes) {
    if (transposed.inputs()[0].shape(axis) == 1) {
      continue;
    }
    if (axis < last) {
      return false;
    }
    last = axis;
  }
  return true;
}

}  // namespace

bool is_view(const Item& item) {
  constexpr std::array<std::string_view, 7> names{"Reshape",    "Flatten",      "Unflatten",       "Squeeze",
                                                  "ExpandDims", "StopGradient", "CustomTransforms"};
  for (const auto name : names) {
    if (item.name == name && item.outputs.size() == 1) {
      return true;
    }
  }
  return item.name == "Transpose" && keeps_order(item.outputs[0]);
}

mx::array source_of(const Plan& plan, const mx::array& of) {
  mx::array source = of;
  for (const Item* item = plan.giver(source); item && is_view(*item); item = plan.giver(source)) {
    source = item->inputs[0];
  }
  return source;
}

const Item* reader_of(const Plan& plan, const mx::array& of) {
  mx::array array = of;
  for (;;) {
    const auto& readers = plan.readers(array);
    if (readers.size() != 1 || array.id() == plan.result().id()) {
      return nullptr;
    }
    if (!is_view(*readers[0])) {
      return readers[0];
    }
    array = readers[0]->outputs[0];
  }
}

std::size_t reads_of(const Plan& plan, const mx::array& of) {
  std::size_t count = of.id() == plan.result().id();
  for (const Item* reader : plan.readers(of)) {
    count += is_view(*reader) ? reads_of(plan, reader->outputs[0]) : 1;
  }
  return count;
}

const Item* given_by(const Plan& plan, const mx::array& of, const char* name) {
  const Item* item = plan.giver(of);
  return item && item->name == name ? item : nullptr;
}

MaybeArray added_to(const Plan& plan, const Item& addition, const mx::array& of) {
  std::string name = addition.name;  // a compiled function's is made of those of its primitives
  for (std::size_t at; (at = name.find("Broadcast")) != std::string::npos;) {
    name.erase(at, std::string_view("Broadcast").size());
  }
  const mx::array& sum = addition.outputs[0];
  if ((name != "Add" && name != "CompiledAdd") || addition.inputs.size() != 2 || addition.outputs.size() != 1 ||
      sum.dtype() != of.dtype()) {
    return std::nullopt;
  }
  const mx::array& other = addition.inputs[source_of(plan, addition.inputs[0]).id() == source_of(plan, of).id() ? 1 : 0];
  const bool alike = other.dtype() == of.dtype() && other.shape() == sum.shape() && other.size() == of.size();
  return alike ? std::optional(other) : std::nullopt;
}

}  // namespace mlx_cuda
