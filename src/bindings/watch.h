// Whether Python objects still hold what they held: the part of python/mlx_cuda/_decoding/watch.py that runs at each step.
#pragma once

#include <mlx/array.h>
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace mlx_cuda {

namespace mx = mlx::core;
namespace nb = nanobind;

// Compares addresses alone, so that a step costs a few nanoseconds for each of thousands of objects. Nothing is held here: the
// caller keeps every object that it names, but for `model`, and what they hold, so that no other object has the address of one of
// them.
class Watch {
 public:
  // `instances`: whose class and whose attributes' dict stay; `None` is the model. `dicts`, `lists`: whose content stays, but for
  // the entry `unwatched` of dicts; of dicts, too, `None` is the model, and its attributes are watched without being named.
  // `referents(*others)` lists what Python's garbage collector finds in all other objects.
  Watch(
      nb::handle model,
      const nb::list& instances,
      const nb::list& dicts,
      const nb::list& lists,
      nb::tuple others,
      nb::handle referents,
      nb::handle unwatched)
      : model_(model.ptr()), others_(others.ptr()), get_referents_(referents.ptr()), unwatched_(unwatched.ptr()) {
    for (nb::handle each : instances) {
      PyObject* object = each.is_none() ? model_ : each.ptr();
      instances_.push_back({object, Py_TYPE(object), object == model_ ? nullptr : attributes(object).ptr()});
    }
    const nb::object own = attributes(model_);
    add_dict(own.ptr(), nullptr);
    for (nb::handle each : dicts) {
      PyObject* dict = each.is_none() ? model_ : each.ptr();
      add_dict(dict, dict);
    }
    for (nb::handle each : lists) {
      const Py_ssize_t size = PyList_Size(each.ptr());
      lists_.push_back({each.ptr(), values_.size(), static_cast<std::size_t>(size)});
      for (Py_ssize_t i = 0; i < size; ++i) {
        add(nullptr, PyList_GetItem(each.ptr(), i));
      }
    }
    const nb::object found = referents_now();
    const Py_ssize_t size = PyList_Size(found.ptr());
    for (Py_ssize_t i = 0; i < size; ++i) {
      referents_.push_back(PyList_GetItem(found.ptr(), i));
    }
  }

  bool unchanged(nb::handle model) const {
    if (model.ptr() != model_) {
      return false;
    }
    for (const Instance& each : instances_) {
      if (Py_TYPE(each.object) != each.cls || (each.attributes && attributes(each.object).ptr() != each.attributes)) {
        return false;
      }
    }
    const nb::object own = attributes(model_);
    for (const Content& each : dicts_) {
      if (!same_dict(each, each.of ? each.of : own.ptr())) {
        return false;
      }
    }
    for (const Content& each : lists_) {
      if (!same_list(each)) {
        return false;
      }
    }
    for (const auto& [array, id] : arrays_) {
      if (array->id() != id) {
        return false;
      }
    }
    return same_referents();
  }

 private:
  struct Instance {
    PyObject* object;
    PyTypeObject* cls;
    PyObject* attributes;  // none: an object without, or the model
  };
  struct Content {
    PyObject* of;  // none: the model's attributes
    std::size_t first;
    std::size_t count;
  };

  static nb::object attributes(PyObject* object) {
    PyObject* dict = PyObject_GenericGetDict(object, nullptr);
    if (!dict) {
      PyErr_Clear();
    }
    return nb::steal(dict);
  }

  void add(PyObject* key, PyObject* value) {
    keys_.push_back(key);
    values_.push_back(value);
    if (nb::isinstance<mx::array>(value)) {  // Python's object stays while an update in place gives it another array
      const auto* array = nb::inst_ptr<mx::array>(value);
      arrays_.emplace_back(array, array->id());
    }
  }

  void add_dict(PyObject* dict, PyObject* of) {
    const std::size_t first = values_.size();
    visit(dict, [&](PyObject* key, PyObject* value) {
      add(key, value);
      return true;
    });
    dicts_.push_back({of, first, values_.size() - first});
  }

  // Calls visit(key, value) for each watched entry until it returns false.
  template <typename Visit>
  void visit(PyObject* dict, Visit&& each) const {
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    Py_ssize_t at = 0;
#ifdef Py_GIL_DISABLED
    Py_BEGIN_CRITICAL_SECTION(dict);
#endif
    while (PyDict_Next(dict, &at, &key, &value)) {
      if (key != unwatched_ && !each(key, value)) {
        break;
      }
    }
#ifdef Py_GIL_DISABLED
    Py_END_CRITICAL_SECTION();
#endif
  }

  bool same_dict(const Content& content, PyObject* dict) const {
    std::size_t at = content.first;
    const std::size_t end = content.first + content.count;
    bool same = true;
    visit(dict, [&](PyObject* key, PyObject* value) {
      same = at < end && keys_[at] == key && values_[at] == value;
      ++at;
      return same;
    });
    return same && at == end;
  }

  bool same_list(const Content& content) const {
    if (PyList_Size(content.of) != static_cast<Py_ssize_t>(content.count)) {
      return false;
    }
    for (std::size_t i = 0; i < content.count; ++i) {
      if (PyList_GetItem(content.of, static_cast<Py_ssize_t>(i)) !=
          values_[content.first + i]) {  // an address, which is not looked into
        PyErr_Clear();                   // another thread made the list shorter
        return false;
      }
    }
    return true;
  }

  nb::object referents_now() const {
    PyObject* found = PyObject_CallObject(get_referents_, others_);
    if (!found) {
      nb::raise_python_error();
    }
    return nb::steal(found);
  }

  bool same_referents() const {
    const nb::object found = referents_now();
    if (PyList_Size(found.ptr()) != static_cast<Py_ssize_t>(referents_.size())) {
      return false;
    }
    for (std::size_t i = 0; i < referents_.size(); ++i) {
      if (PyList_GetItem(found.ptr(), static_cast<Py_ssize_t>(i)) != referents_[i]) {
        return false;
      }
    }
    return true;
  }

  PyObject* model_;
  PyObject* others_;
  PyObject* get_referents_;
  PyObject* unwatched_;
  std::vector<Instance> instances_{};
  std::vector<Content> dicts_{};
  std::vector<Content> lists_{};
  std::vector<PyObject*> keys_{};  // of dicts, beside their values
  std::vector<PyObject*> values_{};
  std::vector<PyObject*> referents_{};
  std::vector<std::pair<const mx::array*, std::uintptr_t>> arrays_{};
};

// A list's arrays; empty where something else is in it.
inline std::vector<const mx::array*> arrays_of(const nb::list& given) {
  std::vector<const mx::array*> arrays;
  for (nb::handle each : given) {
    if (!nb::isinstance<mx::array>(each)) {
      return {};
    }
    arrays.push_back(nb::inst_ptr<mx::array>(each));
  }
  return arrays;
}

inline void bind_watch(nb::module_& m) {
  nb::class_<Watch>(m, "Watch")
      .def(
          nb::init<nb::handle, const nb::list&, const nb::list&, const nb::list&, nb::tuple, nb::handle, nb::handle>(),
          nb::arg("model"), nb::arg("instances"), nb::arg("dicts"), nb::arg("lists"), nb::arg("others"), nb::arg("referents"),
          nb::arg("unwatched"))
      .def("unchanged", &Watch::unchanged, nb::arg("model"));
  m.def(
      "same_arrays",
      [](const nb::list& given, const nb::list& known) {
        auto same = [](const mx::array* one, const mx::array* other) { return one->id() == other->id(); };
        const auto one = arrays_of(given);
        const auto other = arrays_of(known);
        return std::equal(one.begin(), one.end(), other.begin(), other.end(), same);
      },
      nb::arg("given"), nb::arg("known"));
}

}  // namespace mlx_cuda
