// The parts of the native module.
#pragma once

#include <nanobind/nanobind.h>

namespace mlx_cuda {

// The engines of attention.
void bind_attention(nanobind::module_& m);

// Quantized, gathered, grouped and FP8 matmuls.
void bind_matmul(nanobind::module_& m);

// Linear attention, whose state takes the place of keys and values.
void bind_linear_attention(nanobind::module_& m);

// Functions of arrays that build a graph by what their arguments look like: a call that looks like one before is given the graph of
// that one, and Python's rules are not asked again.
void bind_call_cache(nanobind::module_& m);

// Has every such call be computed by its function again.
void forget_calls();

// Decoding steps that are captured once and launched for each token.
void bind_decoding(nanobind::module_& m);

}  // namespace mlx_cuda
