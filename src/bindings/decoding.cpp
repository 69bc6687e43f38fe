#include "bindings/parts.h"
#include "decoding/step.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

namespace mx = mlx::core;
namespace nb = nanobind;
using namespace nb::literals;

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

// A list's arrays; empty where something else is in it.
std::vector<const mx::array*> arrays_of(const nb::list& given) {
  std::vector<const mx::array*> arrays;
  for (nb::handle each : given) {
    if (!nb::isinstance<mx::array>(each)) {
      return {};
    }
    arrays.push_back(nb::inst_ptr<mx::array>(each));
  }
  return arrays;
}

// What a model's modules hold, by identity: their arrays, and the modules and lists that lead to them.
//
// Nothing is owned, so that a model is freed as if nobody watched it; an owner comes before what it holds, so that nothing is
// looked into that its owner does not hold any more.
class Held {
 public:
  explicit Held(nb::handle model) {
    look_into(model.ptr());
  }

  bool unchanged() const {
    for (const Entry& entry : entries_) {
      PyObject* value = value_of(entry);
      if (value != entry.value || (entry.array && nb::inst_ptr<mx::array>(value)->id() != entry.array)) {
        return false;
      }
    }
    return true;
  }

 private:
  struct Entry {
    PyObject* owner;
    nb::object key;  // of a dict; none: a list
    Py_ssize_t index;
    PyObject* value;
    std::uintptr_t array;  // its identity beneath Python's object, which may be given another
  };

  static PyObject* value_of(const Entry& entry) {
    if (entry.key.is_valid()) {
      return PyDict_Check(entry.owner) ? PyDict_GetItemWithError(entry.owner, entry.key.ptr()) : nullptr;
    }
    return PyList_Check(entry.owner) && entry.index < PyList_Size(entry.owner) ? PyList_GetItem(entry.owner, entry.index) : nullptr;
  }

  void look_into(PyObject* owner) {
    if (PyDict_Check(owner)) {
      PyObject* key = nullptr;
      PyObject* value = nullptr;
      Py_ssize_t at = 0;
      while (PyDict_Next(owner, &at, &key, &value)) {
        add({owner, nb::borrow(key), 0, value, 0});
      }
    } else if (PyList_Check(owner)) {
      for (Py_ssize_t i = 0; i < PyList_Size(owner); ++i) {
        add({owner, {}, i, PyList_GetItem(owner, i), 0});
      }
    }
  }

  void add(Entry entry) {
    if (nb::isinstance<mx::array>(entry.value)) {
      entry.array = nb::inst_ptr<mx::array>(entry.value)->id();
    }
    PyObject* value = entry.value;
    entries_.push_back(std::move(entry));
    look_into(value);
  }

  std::vector<Entry> entries_{};
};

}  // namespace

void bind_decoding(nb::module_& m) {
  nb::class_<Step>(m, "Step")
      .def("tokens", &Step::tokens)
      .def("offset", &Step::offset, "place"_a)
      .def("row", &Step::row, "place"_a)
      .def("offsets", &Step::offsets, "place"_a)
      .def("lengths", &Step::lengths, "place"_a)
      .def("starts", &Step::starts, "place"_a)
      .def("set_sequences", &Step::set_sequences, "sequences"_a)
      .def("append", &Step::append, "keys"_a, "values"_a, "k_cache"_a, "v_cache"_a, "place"_a)
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
      .def("fill", &Step::fill, "content"_a, "caches"_a)
      .def("free", &Step::free)
      .def(
          "owns", [](Step& step, const nb::list& caches) { return step.owns(arrays_of(caches)); }, "caches"_a)
      .def_prop_ro("nodes", &Step::nodes)
      .def_prop_ro("primitives", &Step::primitives);
  m.def(
      "step",
      [](const mx::array& tokens, int places, const mx::Stream& stream) {
        return std::make_shared<Step>(tokens.shape(), tokens.dtype(), places, stream);
      },
      "tokens"_a, "places"_a, "stream"_a);
  m.def(
      "same_arrays",
      [](const nb::list& given, const nb::list& known) {
        auto same = [](const mx::array* one, const mx::array* other) { return one->id() == other->id(); };
        const auto one = arrays_of(given);
        const auto other = arrays_of(known);
        return std::equal(one.begin(), one.end(), other.begin(), other.end(), same);
      },
      "given"_a, "known"_a);
  nb::class_<Held>(m, "Held").def(nb::init<nb::handle>(), "model"_a).def("unchanged", &Held::unchanged);
}

}  // namespace mlx_cuda
