// The parts of the bindings that serve attention.
#pragma once

#include <nanobind/nanobind.h>

namespace mlx_cuda {

// The engines, for calls that Python has checked.
void bind_attention(nanobind::module_& m);

// Calls that are answered before Python looks at them, because it has seen an equal one.
void bind_remembered_attention(nanobind::module_& m);
void bind_remembered_layouts(nanobind::module_& m);

}  // namespace mlx_cuda
