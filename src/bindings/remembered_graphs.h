// Functions of arrays that build a graph by what their arguments look like: a call that looks like one before is answered with its
// graph, and Python's rules are not asked again.
#pragma once

#include <nanobind/nanobind.h>

namespace mlx_cuda {

void bind_remembered_graphs(nanobind::module_& m);

}  // namespace mlx_cuda
