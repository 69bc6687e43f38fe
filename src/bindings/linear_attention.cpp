#include "recurrence/linear_attention.h"

#include "bindings/parts.h"
#include "recurrence/short_conv.h"

#include <mlx/backend/cuda/device.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <vector>

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

// states, changes, slopes, change_slopes, first and, with the delta rule, solve; none where there are no kernels.
std::optional<std::vector<mx::array>> scan(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    const mx::array& g,
    const mx::array& beta,
    const MaybeArray& state,
    const MaybeArray& mask,
    const mx::array& dy,
    const mx::array& last,
    bool delta,
    const mx::Stream& stream) {
  mx::cu::device(stream.device).make_current();
  if (!has_linear_attention_scan(v.dtype(), delta)) {
    return std::nullopt;
  }
  LinearAttentionScan found = linear_attention_scan({q, k, v, g, beta, state, mask, std::nullopt}, dy, last, delta, stream);
  std::vector<mx::array> all{found.states, found.changes, found.slopes, found.change_slopes, found.first};
  if (found.solve) {
    all.push_back(*found.solve);
  }
  return all;
}

// The slopes of q, k, v, g and beta; none where no kernel takes the call.
std::optional<std::vector<mx::array>> slopes(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    const mx::array& g,
    const mx::array& beta,
    const MaybeArray& mask,
    const mx::array& dy,
    const std::vector<mx::array>& found,
    const mx::Stream& stream) {
  mx::cu::device(stream.device).make_current();
  const LinearAttention in{q, k, v, g, beta, std::nullopt, mask, std::nullopt};
  if (!has_linear_attention_slopes(in, found.size() > 5)) {
    return std::nullopt;
  }
  const LinearAttentionScan of{found[0], found[1], found[2],
                               found[3], found[4], found.size() > 5 ? MaybeArray(found[5]) : std::nullopt};
  return linear_attention_slopes(in, dy, of, stream);
}

std::pair<mx::array, mx::array> convolve(
    const mx::array& x,
    const mx::array& weight,
    const MaybeArray& bias,
    const MaybeArray& state,
    bool silu,
    const mx::Stream& stream) {
  return short_conv({x, weight, bias, state}, silu, stream);
}

}  // namespace

void bind_linear_attention(nb::module_& m) {
  m.def(
      "linear_attention", &run, "q"_a, "k"_a, "v"_a, "g"_a, "beta"_a, "state"_a.none(), "mask"_a.none(), "offsets"_a.none(),
      "delta"_a, "chunked"_a, "stream"_a);
  m.def(
      "linear_attention_scan", &scan, "q"_a, "k"_a, "v"_a, "g"_a, "beta"_a, "state"_a.none(), "mask"_a.none(), "dy"_a, "last"_a,
      "delta"_a, "stream"_a);
  m.def("linear_attention_slopes", &slopes, "q"_a, "k"_a, "v"_a, "g"_a, "beta"_a, "mask"_a.none(), "dy"_a, "found"_a, "stream"_a);
  m.def("short_conv", &convolve, "x"_a, "weight"_a, "bias"_a.none(), "state"_a.none(), "silu"_a, "stream"_a);
}

}  // namespace mlx_cuda
