#include "bindings/parts.h"

#include "bindings/graph.h"
#include "runtime/lru.h"

#include <mlx/device.h>
#include <mlx/ops.h>
#include <mlx/stream.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

namespace mlx_cuda {

namespace {

using StreamOrDevice = std::variant<std::monostate, mx::Stream, mx::Device, mx::Device::DeviceType>;
using GrowingAxis = std::tuple<std::size_t, std::string, int>;  // an argument's position and name, and its axis

constexpr std::size_t kMostKeys = 4096;
constexpr std::size_t kMostEntries = 8;  // of one key: calls that differ in the size of their growing axes alone
constexpr std::size_t kMostArrays = 64;  // of one call

struct CachedFunction {
  nb::object function;
  nb::object of_batches;  // what calls go to whose second argument is a batch of matrices; None: they are as others
  nb::object upstream;    // what calls of a shapeless trace go to; None: they are as others
  nb::object prepare;     // gives what has the result, and says for which sizes the graph would be the same; None: there is no such
  std::vector<GrowingAxis> growing;
  std::uint64_t number;
  std::string name;
  std::string text;
  PyMethodDef definition;
};

// The arguments of a call as CPython passes them: positions first, then those of the names.
struct Arguments {
  PyObject* const* values;
  std::size_t positions;
  PyObject* names;
  std::size_t size;

  nb::handle name(std::size_t i) const {
    return PyTuple_GetItem(names, static_cast<Py_ssize_t>(i - positions));
  }
};

// Whether MLX traces a function for arrays of any size (shapeless=True of mx.compile and of exports); no engine may be chosen by
// sizes then. Its flag for that is not exported. But outside such a trace, broadcasting to the same shape returns the array
// itself; and outside of all traces an array is no tracer, even if it is marked as one.
bool in_shapeless_trace() {
  static const mx::array* const marked = [] {
    auto* made = new mx::array(mx::Shape{}, mx::float32, nullptr, {});
    made->set_tracer(true);
    return made;
  }();
  return marked->is_tracer() && mx::broadcast_arrays({*marked, *marked})[0].id() != marked->id();
}

// Sizes of the growing axes.
struct Sizes {
  int fewest;
  int most;

  bool hold(int size) const {
    return fewest <= size && size <= most;
  }
};

struct Entry {
  Sizes sizes;
  Graph graph;
  bool is_tuple;  // of results
};

std::atomic<std::uint64_t> functions_made = 0;
std::atomic<std::uint64_t> generation = 0;  // of the rules by which Python builds graphs
thread_local LruCache<std::vector<Entry>> cache{kMostKeys};

// The stream that MLX's own operations would run on.
mx::Stream stream_of(const StreamOrDevice& given) {
  if (const auto* stream = std::get_if<mx::Stream>(&given)) {
    return *stream;
  }
  const auto* device = std::get_if<mx::Device>(&given);
  return mx::default_stream(device ? *device : mx::Device(std::get<mx::Device::DeviceType>(given)));
}

nb::handle array_type() {
  static const nb::handle type = nb::type<mx::array>();
  return type;
}

// The cache key of a call, and what it excludes: its arrays and the size of their growing axes.
class CallKey {
 public:
  CallKey(const CachedFunction& function, const mx::Stream& stream)
      : function_(function), key_(function.number, generation.load(std::memory_order_relaxed)) {
    add(stream);
    arrays_.reserve(16);  // and most graphs have fewer steps than are left
  }

  // Adds the arguments; false if calls with such ones are not cached.
  bool append(const Arguments& in);

  const Key& bytes() const {
    return key_;
  }
  // Each array once, in the order of the arguments.
  std::vector<const mx::array*>& arrays() {
    return arrays_;
  }
  // Bit i: the array i has a growing axis.
  std::uint64_t growing() const {
    return growing_;
  }
  int size() const {
    return size_;
  }
  // Whether the arrays may be differentiated or otherwise transformed.
  bool traced() const {
    return traced_;
  }

 private:
  enum class Kind : char { none, no, yes, number, fraction, text, tuple, array, array_again, dtype, stream };

  void add(const mx::Stream& stream) {
    key_.add(stream.index);
    key_.add(stream.device.type);
    key_.add(stream.device.index);
  }
  std::optional<std::string_view> append_text(nb::handle text);
  bool append_array(const mx::array& array, int growing_axis);
  bool append_value(nb::handle value, int growing_axis = -1);

  const CachedFunction& function_;
  Key key_;
  std::vector<const mx::array*> arrays_;
  std::uint64_t growing_ = 0;
  int size_ = -1;
  bool traced_ = false;
};

bool CallKey::append(const Arguments& in) {
  for (std::size_t i = 0; i < in.size; ++i) {
    std::string_view named;
    if (i >= in.positions) {
      const auto text = append_text(in.name(i));
      if (!text) {
        return false;
      }
      named = *text;
    }
    int growing_axis = -1;
    for (const auto& [position, name, axis] : function_.growing) {
      if (i < in.positions ? i == position : named == name) {
        growing_axis = axis;
      }
    }
    if (!append_value(in.values[i], growing_axis)) {
      return false;
    }
  }
  return true;
}

std::optional<std::string_view> CallKey::append_text(nb::handle text) {
  Py_ssize_t size = 0;
  const char* bytes = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
  if (!bytes) {
    PyErr_Clear();
    return std::nullopt;
  }
  key_.add(Kind::text);
  key_.add(size);
  key_.add(bytes, static_cast<std::size_t>(size));
  return std::string_view(bytes, static_cast<std::size_t>(size));
}

bool CallKey::append_array(const mx::array& array, int growing_axis) {
  const auto& shape = array.shape();
  const std::size_t dimensions = array.ndim();
  const bool grows = growing_axis >= 0 && static_cast<std::size_t>(growing_axis) < dimensions;
  if (grows && std::exchange(size_, shape[growing_axis]) != shape[growing_axis] && growing_ != 0) {
    return false;  // they grow together
  }
  std::size_t place = 0;
  while (place < arrays_.size() && arrays_[place]->id() != array.id()) {
    ++place;
  }
  if (place == kMostArrays) {
    return false;
  }
  growing_ |= std::uint64_t{grows} << place;
  if (place < arrays_.size()) {
    key_.add(Kind::array_again);
    key_.add(place);
    return true;
  }
  const bool tracer = array.is_tracer();
  key_.add(Kind::array);
  key_.add(array.dtype().val());
  key_.add(tracer);
  key_.add(dimensions);
  const std::size_t before = grows ? growing_axis : dimensions;
  key_.add(shape.data(), before);
  if (grows) {
    key_.add(shape.data() + before + 1, dimensions - before - 1);
  }
  arrays_.push_back(&array);
  traced_ = traced_ || tracer;
  return true;
}

bool CallKey::append_value(nb::handle value, int growing_axis) {
  PyObject* const object = value.ptr();
  if (value.type().is(array_type())) {
    return append_array(*nb::inst_ptr<mx::array>(value), growing_axis);
  }
  if (object == Py_None || object == Py_True || object == Py_False) {
    key_.add(object == Py_None ? Kind::none : object == Py_True ? Kind::yes : Kind::no);
    return true;
  }
  if (PyLong_CheckExact(object)) {
    int overflow = 0;
    key_.add(Kind::number);
    key_.add(PyLong_AsLongLongAndOverflow(object, &overflow));
    return overflow == 0;
  }
  if (PyFloat_CheckExact(object)) {
    key_.add(Kind::fraction);
    key_.add(PyFloat_AsDouble(object));
    return true;
  }
  if (PyUnicode_CheckExact(object)) {
    return append_text(value).has_value();
  }
  if (PyTuple_CheckExact(object)) {
    const Py_ssize_t size = PyTuple_Size(object);
    key_.add(Kind::tuple);
    key_.add(size);
    for (Py_ssize_t i = 0; i < size; ++i) {
      if (!append_value(PyTuple_GetItem(object, i))) {
        return false;
      }
    }
    return true;
  }
  if (nb::isinstance<mx::Dtype>(value)) {
    key_.add(Kind::dtype);
    key_.add(nb::inst_ptr<mx::Dtype>(value)->val());
    return true;
  }
  StreamOrDevice stream;
  if (!nb::try_cast(value, stream)) {
    return false;
  }
  key_.add(Kind::stream);
  add(stream_of(stream));
  return true;
}

nb::object call_python(const nb::object& function, const Arguments& in) {
  nb::dict options;
  for (std::size_t i = in.positions; i < in.size; ++i) {
    options[in.name(i)] = nb::handle(in.values[i]);
  }
  nb::list positions;
  for (std::size_t i = 0; i < in.positions; ++i) {
    positions.append(nb::handle(in.values[i]));
  }
  return function(*positions, **options);
}

// The result by Python, and for which sizes of its growing axes the graph holds.
std::pair<nb::object, Sizes> computed(const CachedFunction& function, const Arguments& in, int size) {
  if (function.prepare.is_none()) {
    return {call_python(function.function, in), {size, size}};
  }
  const nb::object prepared = call_python(function.prepare, in);
  const nb::object said = function.growing.empty() ? nb::none() : prepared.attr("sizes");
  const auto [fewest, most] = said.is_none() ? std::pair(size, size) : nb::cast<std::pair<int, int>>(said);
  return {prepared.attr("result")(), {fewest, most}};
}

void keep(CallKey& key, nb::handle result, Sizes sizes) {
  const bool is_tuple = PyTuple_CheckExact(result.ptr());
  std::vector<const mx::array*> results;
  for (std::size_t i = 0; i < (is_tuple ? nb::len(result) : 1); ++i) {
    const nb::handle one = is_tuple ? nb::handle(PyTuple_GetItem(result.ptr(), static_cast<Py_ssize_t>(i))) : result;
    if (!one.type().is(array_type())) {
      return;
    }
    results.push_back(nb::inst_ptr<mx::array>(one));
  }
  auto graph = Graph::between(key.arrays(), results, key.traced());
  if (!graph || !graph->uses_all(key.arrays().size())) {
    return;
  }
  const bool as_python_says = sizes.hold(key.size()) && graph->one_step_reads(key.growing());
  auto& entries = cache.get(key.bytes(), [] { return std::vector<Entry>(); });
  if (entries.size() == kMostEntries) {
    entries.pop_back();
  }
  entries.insert(entries.begin(), {as_python_says ? sizes : Sizes{key.size(), key.size()}, std::move(*graph), is_tuple});
}

nb::object repeat(const Entry& entry, std::vector<const mx::array*>& values) {
  Arrays made;
  entry.graph.repeat(values, made);
  const auto& places = entry.graph.results();
  if (!entry.is_tuple) {
    return nb::cast(*values[places[0]]);
  }
  nb::object results = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(places.size())));
  for (std::size_t i = 0; i < places.size(); ++i) {
    PyTuple_SetItem(results.ptr(), static_cast<Py_ssize_t>(i), nb::cast(*values[places[i]]).release().ptr());
  }
  return results;
}

bool second_is_batch(const Arguments& in) {
  const nb::handle second = in.positions > 1 ? in.values[1] : nullptr;
  if (!second || !second.type().is(array_type())) {
    return false;
  }
  const auto& shape = nb::inst_ptr<mx::array>(second)->shape();
  return shape.size() > 2 && std::any_of(shape.begin(), shape.end() - 2, [](int size) { return size > 1; });
}

nb::object lookup(const CachedFunction& function, const Arguments& in) {
  if (!function.upstream.is_none() && in_shapeless_trace()) {
    return call_python(function.upstream, in);
  }
  if (!function.of_batches.is_none() && second_is_batch(in)) {
    return call_python(function.of_batches, in);
  }
  CallKey key(function, mx::default_stream(mx::default_device()));
  const bool cacheable = key.append(in);
  if (const auto* entries = cacheable ? cache.find(key.bytes()) : nullptr) {
    for (const Entry& entry : *entries) {
      if (entry.sizes.hold(key.size())) {
        return repeat(entry, key.arrays());
      }
    }
  }
  auto [result, sizes] = computed(function, in, key.size());
  if (cacheable) {
    keep(key, result, sizes);
  }
  return result;
}

PyObject* call(PyObject* self, PyObject* const* values, Py_ssize_t positions, PyObject* names) {
  try {
    const auto* function = static_cast<const CachedFunction*>(nb::borrow<nb::capsule>(self).data());
    const std::size_t named = names ? nb::len(nb::handle(names)) : 0;
    return lookup(*function, {values, static_cast<std::size_t>(positions), names, positions + named}).release().ptr();
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

// The function, in C: no frame of Python, and no tuple or dict of the arguments, is between its caller and the cache.
nb::object cached(
    nb::object function, std::vector<GrowingAxis> growing, nb::object of_batches, nb::object upstream, nb::object prepare) {
  auto name = nb::cast<std::string>(function.attr("__name__"));
  const nb::object doc = function.attr("__doc__");
  std::string text = doc.is_none() ? "" : nb::cast<std::string>(doc);
  const nb::object home = function.attr("__module__");
  auto* made = new CachedFunction{std::move(function), std::move(of_batches), std::move(upstream),
                                  std::move(prepare),  std::move(growing),    functions_made++,
                                  std::move(name),     std::move(text),       {}};
  const nb::capsule self(made, [](void* owned) noexcept { delete static_cast<CachedFunction*>(owned); });
  const auto address = reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call));
  made->definition = {made->name.c_str(), address, METH_FASTCALL | METH_KEYWORDS, made->text.c_str()};
  return nb::steal(PyCFunction_NewEx(&made->definition, self.ptr(), home.ptr()));
}

}  // namespace

void forget_calls() {
  ++generation;
}

void bind_call_cache(nb::module_& m) {
  m.def(
      "cached", &cached, "function"_a, "growing"_a, "of_batches"_a.none() = nb::none(), "upstream"_a.none() = nb::none(),
      "prepare"_a.none() = nb::none(),
      "The function, whose calls of equal shapes, dtypes and options are given the graph that the first of them built.");
  m.def("in_shapeless_trace", &in_shapeless_trace, "Whether MLX traces a function for arrays of any size.");
  m.def("forget_calls", &forget_calls, "Has every call be computed by its function again.");
}

}  // namespace mlx_cuda
