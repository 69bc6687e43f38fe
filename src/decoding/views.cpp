#include "decoding/views.h"

#include <mlx/primitives.h>

#include <array>
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

bool is_view(const Item& item) {
  constexpr std::array<std::string_view, 6> names{"Reshape", "Flatten", "Unflatten", "Squeeze", "ExpandDims", "StopGradient"};
  for (const auto name : names) {
    if (item.name == name) {
      return true;
    }
  }
  return item.name == "Transpose" && keeps_order(item.outputs[0]);
}

}  // namespace

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

const Item* given_by(const Plan& plan, const mx::array& of, const char* name) {
  const Item* item = plan.giver(of);
  return item && item->name == name ? item : nullptr;
}

}  // namespace mlx_cuda
