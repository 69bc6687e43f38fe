#include "bindings/parts.h"
#include "bindings/watch.h"
#include "decoding/capture/lifetimes.h"
#include "decoding/capture/self_test.h"
#include "decoding/capture/step.h"
#include "decoding/fusion/sums.h"
#include "decoding/graph/capture_error.h"

#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace mlx_cuda {

namespace {

using GivenPlaces = std::vector<std::tuple<int, int, int, int>>;

std::vector<Place> places_from(const GivenPlaces& given) {
  std::vector<Place> places;
  for (const auto& [offset, row, length, start] : given) {
    places.push_back({offset, row, length, start});
  }
  return places;
}

// Raises, and warns once, where no step is captured.
void require_captures(const mx::Stream& stream) {
  const std::string refusal = [&] {
    const nb::gil_scoped_release unlocked;
    return capture_refusal(stream);
  }();
  if (refusal.empty()) {
    return;
  }
  static std::atomic<bool> said = false;
  const std::string text = "mlx_cuda captures no decode steps, which makes them slower: " + refusal +
                           "\n  fix: reinstall that MLX version; see python -m mlx_cuda doctor";
  if (!said.exchange(true) && PyErr_WarnEx(PyExc_RuntimeWarning, text.c_str(), 1) != 0) {
    throw nb::python_error();
  }
  throw CaptureError(refusal);
}

}  // namespace

void bind_decoding(nb::module_& m) {
  nb::exception<CaptureError>(m, "CaptureError", PyExc_RuntimeError);
  nb::class_<Step>(m, "Step")
      .def("tokens", &Step::tokens)
      .def("offset", &Step::offset, "place"_a)
      .def("row", &Step::row, "place"_a)
      .def("offsets", &Step::offsets, "place"_a)
      .def("lengths", &Step::lengths, "place"_a)
      .def("starts", &Step::starts, "place"_a)
      .def("table", &Step::table, "place"_a)
      .def("content", &Step::content, "memory"_a)
      .def("finish", &Step::finish, "result"_a, "from"_a, "to"_a)
      .def("set_sequences", &Step::set_sequences, "sequences"_a, "table"_a = nb::none())
      .def("append", &Step::append, "keys"_a, "values"_a, "k_cache"_a, "v_cache"_a, "place"_a)
      .def("append_quantized", &Step::append_quantized, "keys"_a, "values"_a, "memory"_a, "group_size"_a, "bits"_a, "place"_a)
      .def(
          "record",
          [](Step& step, const mx::array& result, const mx::array& tokens, const GivenPlaces& places) {
            const auto at = places_from(places);
            const nb::gil_scoped_release unlocked;
            step.record(result, tokens, at);
          },
          "result"_a, "tokens"_a, "places"_a)
      .def(
          "replay",
          [](Step& step, const mx::array& tokens, const GivenPlaces& places, const mx::Stream& stream) {
            const auto at = places_from(places);
            const nb::gil_scoped_release unlocked;
            return step.replay(tokens, at, stream);
          },
          "tokens"_a, "places"_a, "stream"_a)
      .def("fill", &Step::fill, "content"_a, "rows"_a, "caches"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("clear", &Step::clear, "rows"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("free", &Step::free)
      .def("moved", &Step::moved)
      .def("has_arrays_left", &Step::has_arrays_left)
      .def(
          "owns", [](Step& step, const nb::list& caches) { return step.owns(arrays_of(caches)); }, "caches"_a)
      .def("leave_alone", &Step::leave_alone, "alone"_a)
      .def_prop_ro("has_sums", &Step::has_sums)
      .def_prop_ro("nodes", &Step::nodes)
      .def_prop_ro("primitives", &Step::primitives);
  m.def(
      "step",
      [](const mx::array& tokens, int places, const mx::Stream& stream, std::optional<std::pair<int, int>> pages) {
        require_captures(stream);
        const auto paged = pages ? std::optional(Step::Pages{pages->first, pages->second}) : std::nullopt;
        return capturing([&] { return std::make_shared<Step>(tokens.shape(), tokens.dtype(), places, paged, stream); });
      },
      "tokens"_a, "places"_a, "stream"_a, "pages"_a = nb::none());
  m.def("capture_refusal", &capture_refusal, "stream"_a);
  nb::class_<Lifetimes>(m, "Lifetimes")
      .def("any_left", [](const Lifetimes& of, const nb::list& known) { return of.any_left(arrays_of(known)); }, "known"_a);
  m.def("lifetimes_between", &lifetimes_between, "input"_a, "result"_a);
  m.def("sum_with_residuals", &sum_with_residuals, "results"_a);
  bind_watch(m);
}

}  // namespace mlx_cuda
