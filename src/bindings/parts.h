// The parts of the native module.
#pragma once

#include <nanobind/nanobind.h>

namespace mlx_cuda {

namespace nb = nanobind;
using namespace nb::literals;

// The engines of attention.
void bind_attention(nb::module_& m);

// Quantized, gathered, grouped and FP8 matmuls.
void bind_matmul(nb::module_& m);

// Linear attention, whose state replaces the KV cache.
void bind_linear_attention(nb::module_& m);

// The dispatch cache: a call that looks like an earlier one gets that one's graph, without Python's rules.
void bind_call_cache(nb::module_& m);

// Has every such call be computed by its function again.
void forget_calls();

// Decoding steps that are captured once and launched for each token.
void bind_decoding(nb::module_& m);

}  // namespace mlx_cuda
