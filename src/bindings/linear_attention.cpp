#include "recurrence/linear_attention.h"

#include "bindings/parts.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

namespace mlx_cuda {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using MaybeArray = std::optional<mx::array>;

std::pair<mx::array, mx::array> run(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    const mx::array& g,
    const mx::array& beta,
    const MaybeArray& state,
    const MaybeArray& mask,
    const MaybeArray& offsets,
    bool delta,
    bool chunked,
    const mx::Stream& stream) {
  return linear_attention({q, k, v, g, beta, state, mask, offsets}, {delta, chunked}, stream);
}

}  // namespace

void bind_linear_attention(nb::module_& m) {
  m.def(
      "linear_attention", &run, "q"_a, "k"_a, "v"_a, "g"_a, "beta"_a, "state"_a.none(), "mask"_a.none(), "offsets"_a.none(),
      "delta"_a, "chunked"_a, "stream"_a);
}

}  // namespace mlx_cuda
