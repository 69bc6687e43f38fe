// Through primitives that only give an array another shape.
#pragma once

#include "decoding/plan.h"

namespace mlx_cuda {

// The array whose elements, in their order, this one has.
mx::array source_of(const Plan& plan, const mx::array& of);

// The one that reads an array, or that reads the only other shape of it; null where it is not the only one.
const Item* reader_of(const Plan& plan, const mx::array& of);

// The primitive that gives an array, if it has this name.
const Item* given_by(const Plan& plan, const mx::array& of, const char* name);

}  // namespace mlx_cuda
