// What Python has checked of a call of attention: `Options` of python/mlx_cuda/_attention/options.py.
#pragma once

#include "attention/composed.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include <optional>
#include <utility>

namespace mlx_cuda {

struct CheckedOptions {
  AttentionOptions options;
  AttentionExtras extras;
  bool lse;
  bool deterministic;
};

inline CheckedOptions checked_options(nanobind::handle python) {
  namespace nb = nanobind;
  auto array = [&](const char* name) { return nb::cast<std::optional<mx::array>>(python.attr(name)); };
  auto number = [&](const char* name) { return nb::cast<float>(python.attr(name)); };
  auto flag = [&](const char* name) { return nb::cast<bool>(python.attr(name)); };
  const auto [left, right] = nb::cast<std::pair<int, int>>(python.attr("window"));
  return {
      .options = {.scale = number("scale"), .softcap = number("softcap"), .window_left = left, .window_right = right},
      .extras = {.mask = array("mask"), .starts = array("starts"), .ends = array("ends"), .sinks = array("sinks")},
      .lse = flag("lse"),
      .deterministic = flag("deterministic"),
  };
}

}  // namespace mlx_cuda
