// Functions of arrays that build a graph by what their arguments look like: a call that looks like one before is given the graph of
// that one, and Python's rules are not asked again.
#pragma once

#include <nanobind/nanobind.h>

namespace mlx_cuda {

void bind_call_cache(nanobind::module_& m);

}  // namespace mlx_cuda
