// Whether a model still holds what it held.
#pragma once

#include <mlx/array.h>
#include <nanobind/nanobind.h>

#include <optional>
#include <unordered_set>
#include <utility>
#include <vector>

#if Py_LIMITED_API < 0x030D0000
extern "C" PyAPI_FUNC(PyObject*) PyWeakref_GetObject(PyObject*);  // in every stable ABI of the GIL, but not in the headers of 3.15
#endif

namespace mlx_cuda {

namespace mx = mlx::core;
namespace nb = nanobind;

// What a model's modules hold, by identity: their arrays, and the modules, lists and tuples that lead to them.
//
// Arrays, and whatever else refers to nothing, are kept, so that no other one has the address of one that is gone. Modules are
// referred to weakly, so that a model is freed as if nobody watched it; what cannot be, as a list, is as good as another one at its
// address that holds the same. An owner comes before what it holds, so that nothing is looked into that its owner does not hold any
// more.
class Held {
 public:
  explicit Held(nb::handle model) {
    add({nullptr, {}, 0, model.ptr()});
  }

  bool unchanged() const {
    const auto others = replaced();
    return others && others->empty();
  }

  // What is in the place of its arrays that are others now, each after the one that was there; none if it is not arrays alone.
  std::optional<std::vector<std::pair<mx::array, mx::array>>> replaced() const {
    std::vector<std::pair<mx::array, mx::array>> others;
    for (const Entry& entry : entries_) {
      PyObject* value = value_of(entry);
      const bool same = value == entry.value && (!entry.weak.is_valid() || refers_to(entry.weak.ptr(), value));
      if (entry.array && (same || (value && nb::isinstance<mx::array>(value)))) {
        if (const auto& now = *nb::inst_ptr<mx::array>(value); now.id() != entry.array->id()) {
          others.emplace_back(*entry.array, now);
        }
      } else if (!same || size_of(value) != entry.size) {
        return std::nullopt;
      }
    }
    return others;
  }

 private:
  struct Entry {
    PyObject* owner;  // none: the model itself
    nb::object key;   // of a dict; none: a list or a tuple
    Py_ssize_t index;
    PyObject* value;
    nb::object kept{};                 // the value, if it refers to nothing: an array is still one
    std::optional<mx::array> array{};  // what is beneath Python's object, which may be given another
    nb::object weak{};                 // to the value, if there can be one
    Py_ssize_t size = 0;
  };

  static PyObject* value_of(const Entry& entry) {
    PyObject* owner = entry.owner;
    if (!owner) {
      return entry.value;
    }
    if (entry.key.is_valid()) {
      return PyDict_Check(owner) ? PyDict_GetItemWithError(owner, entry.key.ptr()) : nullptr;
    }
    if (PyList_Check(owner)) {
      return entry.index < PyList_Size(owner) ? PyList_GetItem(owner, entry.index) : nullptr;
    }
    return PyTuple_Check(owner) && entry.index < PyTuple_Size(owner) ? PyTuple_GetItem(owner, entry.index) : nullptr;
  }

  static bool refers_to(PyObject* weak, PyObject* value) {
#if Py_LIMITED_API >= 0x030D0000
    PyObject* there = nullptr;
    PyWeakref_GetRef(weak, &there);
    return nb::steal(there).is(value);
#else
    return PyWeakref_GetObject(weak) == value;
#endif
  }

  static Py_ssize_t size_of(PyObject* value) {
    return PyDict_Check(value) ? PyDict_Size(value) : PyList_Check(value) ? PyList_Size(value) : 0;
  }

  void add(Entry entry) {
    PyObject* value = entry.value;
    entry.size = size_of(value);
    if (nb::isinstance<mx::array>(value)) {
      entry.array = *nb::inst_ptr<mx::array>(value);
    }
    if (entry.array || !(PyType_GetFlags(Py_TYPE(value)) & Py_TPFLAGS_HAVE_GC)) {
      entry.kept = nb::borrow(value);
    } else if (PyObject* weak = PyWeakref_NewRef(value, nullptr)) {
      entry.weak = nb::steal(weak);
    } else {
      PyErr_Clear();
    }
    entries_.push_back(std::move(entry));
    if (seen_.insert(value).second) {
      look_into(value);
    }
  }

  void look_into(PyObject* owner) {
    if (PyDict_Check(owner)) {
      PyObject* key = nullptr;
      PyObject* value = nullptr;
      Py_ssize_t at = 0;
      while (PyDict_Next(owner, &at, &key, &value)) {
        add({owner, nb::borrow(key), 0, value});
      }
    } else if (PyList_Check(owner)) {
      for (Py_ssize_t i = 0; i < PyList_Size(owner); ++i) {
        add({owner, {}, i, PyList_GetItem(owner, i)});
      }
    } else if (PyTuple_Check(owner)) {
      for (Py_ssize_t i = 0; i < PyTuple_Size(owner); ++i) {
        add({owner, {}, i, PyTuple_GetItem(owner, i)});
      }
    }
  }

  std::vector<Entry> entries_{};
  std::unordered_set<PyObject*> seen_{};  // modules may refer to each other
};

}  // namespace mlx_cuda
