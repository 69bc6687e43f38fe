// The parts of the native module.
#pragma once

#include <nanobind/nanobind.h>

namespace mlx_cuda {

// The engines of attention.
void bind_attention(nanobind::module_& m);

// Quantized, gathered, grouped and FP8 matmuls.
void bind_matmul(nanobind::module_& m);

// Linear attention, whose state replaces the KV cache.
void bind_linear_attention(nanobind::module_& m);

// The dispatch cache: a call that looks like an earlier one gets that one's graph, without Python's rules.
void bind_call_cache(nanobind::module_& m);

// Has every such call be computed by its function again.
void forget_calls();

// Decoding steps that are captured once and launched for each token.
void bind_decoding(nanobind::module_& m);

}  // namespace mlx_cuda
