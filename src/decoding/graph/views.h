// Ways through a plan, past primitives that only give an array another shape.
#pragma once

#include "decoding/graph/plan.h"

#include <cstddef>

namespace mlx_cuda {

// Whether it only gives an array another shape.
bool is_view(const Item& item);

// The array whose elements, in their order, this one has.
mx::array source_of(const Plan& plan, const mx::array& of);

// The one that reads an array, or that reads the only other shape of it; null where it is not the only one.
const Item* reader_of(const Plan& plan, const mx::array& of);

// How often primitives read an array, whatever its shape; the result of the plan is read besides.
std::size_t reads_of(const Plan& plan, const mx::array& of);

// The primitive that gives an array, if it has this name.
const Item* given_by(const Plan& plan, const mx::array& of, const char* name);

// The other term of an addition to an array of the same shape and type; none if the primitive is not that.
MaybeArray added_to(const Plan& plan, const Item& addition, const mx::array& of);

}  // namespace mlx_cuda
