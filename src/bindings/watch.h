// Whether Python objects still hold what they held: the part of python/mlx_cuda/_replay/watch.py that runs at each step.
#pragma once

#include "bindings/parts.h"
#include "runtime/arrays.h"

#include <nanobind/stl/pair.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace mlx_cuda {

// Compares addresses only, so that a step costs a few nanoseconds for each of thousands of objects. No references are held: the
// caller keeps every object that it names, except `model`, and what they hold, so that no other object has one of their
// addresses.
class Watch {
 public:
  // None means the model. `instances`: their class must not change. `dicts`: pairs of an object, or False, and a dict, or False
  // for the model's attributes. The dict's content must not change, except entries named `unwatched`; and it must still be the
  // object's `__dict__`, if there is one. `lists`: their content must not change. `referents(*others)` lists the references that
  // Python's garbage collector finds in all other objects.
  Watch(
      nb::handle model,
      const nb::list& instances,
      const nb::list& dicts,
      const nb::list& lists,
      nb::handle others,
      nb::handle referents,
      const nb::tuple& unwatched)
      : model_(model.ptr()), others_(others.ptr()), get_referents_(referents.ptr()) {
    for (nb::handle each : unwatched) {
      unwatched_.push_back(each.ptr());
    }
    auto named = [&](nb::handle each) { return each.is_none() ? model_ : each.is(Py_False) ? nullptr : each.ptr(); };
    for (nb::handle each : instances) {
      instances_.emplace_back(named(each), Py_TYPE(named(each)));
    }
    for (nb::handle each : dicts) {
      const auto [owner, dict] = nb::cast<std::pair<nb::handle, nb::handle>>(each);
      add_dict(named(owner), named(dict));
    }
    for (nb::handle each : lists) {
      lists_.push_back(list_content(each));
    }
    referents_ = list_content(referents_now());
  }

  bool unchanged(nb::handle model) const {
    if (model.ptr() != model_) {
      return false;
    }
    for (const auto& [object, cls] : instances_) {
      if (Py_TYPE(object) != cls) {
        return false;
      }
    }
    for (const Content& each : dicts_) {
      if ((each.owner && attributes(each.owner).ptr() != each.of) || !same_content(each)) {
        return false;
      }
    }
    for (const Content& each : lists_) {
      if (!same_list(each, each.of)) {
        return false;
      }
    }
    for (const auto& [array, id] : arrays_) {
      if (array->id() != id) {
        return false;
      }
    }
    return same_list(referents_, referents_now());
  }

 private:
  struct Content {
    PyObject* of;  // a dict or list; none: the dict of the model's attributes
    std::size_t first;
    std::size_t count;
    PyObject* owner = nullptr;
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
    if (nb::isinstance<mx::array>(value)) {  // Python's object stays, while an update in place gives it another array
      const auto* array = nb::inst_ptr<mx::array>(value);
      arrays_.emplace_back(array, array->id());
    }
  }

  void add_dict(PyObject* owner, PyObject* dict) {
    const std::size_t first = values_.size();
    const nb::object content = dict ? nb::borrow(dict) : attributes(model_);
    visit(content.ptr(), [&](PyObject* key, PyObject* value) {
      if (!is_unwatched(key)) {
        add(key, value);
      }
      return true;
    });
    dicts_.push_back({dict, first, values_.size() - first, owner});
  }

  Content list_content(nb::handle list) {
    const Content content{list.ptr(), values_.size(), static_cast<std::size_t>(PyList_Size(list.ptr()))};
    for (std::size_t i = 0; i < content.count; ++i) {
      add(nullptr, PyList_GetItem(list.ptr(), static_cast<Py_ssize_t>(i)));
    }
    return content;
  }

  bool is_unwatched(PyObject* key) const {
    return std::find(unwatched_.begin(), unwatched_.end(), key) != unwatched_.end();
  }

  // Calls visit(key, value) for each entry until it returns false.
  template <typename Visit>
  void visit(PyObject* dict, Visit&& each) const {
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    Py_ssize_t at = 0;
#ifdef Py_GIL_DISABLED
    Py_BEGIN_CRITICAL_SECTION(dict);
#endif
    while (PyDict_Next(dict, &at, &key, &value)) {
      if (!each(key, value)) {
        break;
      }
    }
#ifdef Py_GIL_DISABLED
    Py_END_CRITICAL_SECTION();
#endif
  }

  bool same_content(const Content& content) const {
    const nb::object own = content.of ? nb::object() : attributes(model_);
    PyObject* dict = content.of ? content.of : own.ptr();
    std::size_t at = content.first;
    const std::size_t end = content.first + content.count;
    bool same = true;
    visit(dict, [&](PyObject* key, PyObject* value) {
      if (at < end && keys_[at] == key && values_[at] == value) {
        ++at;
        return true;
      }
      same = is_unwatched(key);  // checked rarely, as each step compares thousands of entries
      return same;
    });
    return same && at == end;
  }

  bool same_list(const Content& content, nb::handle list) const {
    if (PyList_Size(list.ptr()) != static_cast<Py_ssize_t>(content.count)) {
      return false;
    }
    for (std::size_t i = 0; i < content.count; ++i) {
      if (PyList_GetItem(list.ptr(), static_cast<Py_ssize_t>(i)) !=
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

  PyObject* model_;
  PyObject* others_;
  PyObject* get_referents_;
  std::vector<PyObject*> unwatched_{};
  std::vector<std::pair<PyObject*, PyTypeObject*>> instances_{};
  std::vector<Content> dicts_{};
  std::vector<Content> lists_{};
  Content referents_{};            // of a new list each time
  std::vector<PyObject*> keys_{};  // of dicts, next to their values
  std::vector<PyObject*> values_{};
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
          nb::init<nb::handle, const nb::list&, const nb::list&, const nb::list&, nb::handle, nb::handle, const nb::tuple&>(),
          "model"_a, "instances"_a, "dicts"_a, "lists"_a, "others"_a, "referents"_a, "unwatched"_a)
      .def("unchanged", &Watch::unchanged, "model"_a);
  m.def(
      "same_arrays",
      [](const nb::list& given, const nb::list& known) {
        auto same = [](const mx::array* one, const mx::array* other) { return one->id() == other->id(); };
        const auto one = arrays_of(given);
        const auto other = arrays_of(known);
        return std::equal(one.begin(), one.end(), other.begin(), other.end(), same);
      },
      "given"_a, "known"_a);
}

}  // namespace mlx_cuda
