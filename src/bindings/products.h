// The parts of the bindings that serve products of quantised, gathered, grouped and 8-bit operands.
#pragma once

#include <nanobind/nanobind.h>

namespace mlx_cuda {

void bind_products(nanobind::module_& m);

}  // namespace mlx_cuda
