// Options of a call of attention that Python has checked: `Options` of python/mlx_cuda/_attention/options.py.
#pragma once

#include "attention/call.h"
#include "bindings/parts.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include <utility>

namespace mlx_cuda {

inline AttentionOptions options_of(nb::handle python) {
  auto number = [&](const char* name) { return nb::cast<float>(python.attr(name)); };
  auto flag = [&](const char* name) { return nb::cast<bool>(python.attr(name)); };
  const auto [left, right] = nb::cast<std::pair<int, int>>(python.attr("window"));
  return {
      .scale = number("scale"),
      .softcap = number("softcap"),
      .window_left = left,
      .window_right = right,
      .lse = flag("lse"),
      .deterministic = flag("deterministic"),
  };
}

inline AttentionArrays arrays_of(const mx::array& q, const mx::array& k, const mx::array& v, nb::handle python) {
  auto array = [&](const char* name) { return nb::cast<MaybeArray>(python.attr(name)); };
  return {
      .q = q,
      .k = k,
      .v = v,
      .mask = array("mask"),
      .starts = array("starts"),
      .ends = array("ends"),
      .sinks = array("sinks"),
  };
}

}  // namespace mlx_cuda
