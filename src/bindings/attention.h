// The parts of the bindings that serve attention.
#pragma once

#include <nanobind/nanobind.h>

namespace mlx_cuda {

void bind_attention(nanobind::module_& m);

}  // namespace mlx_cuda
