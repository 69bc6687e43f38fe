#include "recurrence/linear_attention.h"

#include "bindings/parts.h"
#include "recurrence/short_conv.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <utility>

namespace mlx_cuda {

namespace {

std::pair<mx::array, mx::array> run(const LinearAttention& in, bool delta, bool chunked, const mx::Stream& stream) {
  return linear_attention(in, {delta, chunked}, stream);
}

// A function of a call, whose arrays come one by one, and of what has these names.
template <typename Result, typename... Rest, typename... Names>
void define(nb::module_& m, const char* name, Result (*function)(const LinearAttention&, Rest...), const Names&... names) {
  const auto apply = [function](
                         const mx::array& q, const mx::array& k, const mx::array& v, const mx::array& g, const mx::array& beta,
                         const MaybeArray& state, const MaybeArray& mask, const MaybeArray& offsets,
                         Rest... rest) { return function({q, k, v, g, beta, state, mask, offsets}, rest...); };
  m.def(name, apply, "q"_a, "k"_a, "v"_a, "g"_a, "beta"_a, "state"_a.none(), "mask"_a.none(), "offsets"_a.none(), names...);
}

std::pair<mx::array, mx::array> convolve(
    const mx::array& x,
    const mx::array& weight,
    const MaybeArray& bias,
    const MaybeArray& state,
    bool silu,
    bool padded,
    const mx::Stream& stream) {
  return short_conv({x, weight, bias, state, padded}, silu, stream);
}

}  // namespace

void bind_linear_attention(nb::module_& m) {
  define(m, "linear_attention", &run, "delta"_a, "chunked"_a, "stream"_a);
  define(m, "linear_attention_scan", &linear_attention_scan, "dy"_a, "last"_a, "delta"_a, "stream"_a);
  define(m, "linear_attention_gradients", &linear_attention_gradients, "dy"_a, "found"_a, "stream"_a);
  m.def("short_conv", &convolve, "x"_a, "weight"_a, "bias"_a.none(), "state"_a.none(), "silu"_a, "padded"_a, "stream"_a);
}

}  // namespace mlx_cuda
