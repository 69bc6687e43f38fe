// What of the native module needs no GPU, for tests: the cache of calls, what a model holds, and composed attention.
#include "attention/composed.h"
#include "bindings/attention_options.h"
#include "bindings/graph.h"
#include "bindings/parts.h"
#include "bindings/watch.h"
#include "matmul/grouped/upstream_operand.h"

#include <mlx/primitives.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <vector>

namespace mx = mlx::core;
namespace nb = nanobind;
using namespace nb::literals;

// The tests' own primitives are all but one.
bool mlx_cuda::is_own(const mx::Primitive& primitive) {
  const std::string_view name = primitive.name();
  return name != "Tanh" && name != "CustomTransforms" && name != "StopGradient";
}

// Types of their own: on a machine with a GPU the package's module has registered its own ones.
struct Watch : mlx_cuda::Watch {
  using mlx_cuda::Watch::Watch;
};

NB_MODULE(native_on_cpu, m) {
  nb::module_::import_("mlx.core");  // registers array and Stream

  mlx_cuda::bind_call_cache(m);
  nb::class_<Watch>(m, "Watch")
      .def(
          nb::init<nb::handle, const nb::list&, const nb::list&, const nb::list&, nb::handle, nb::handle, const nb::tuple&>(),
          "model"_a, "instances"_a, "dicts"_a, "lists"_a, "others"_a, "referents"_a, "unwatched"_a)
      .def("unchanged", [](const Watch& watch, nb::handle model) { return watch.unchanged(model); }, "model"_a);
  m.def("same_arrays", [](const std::vector<mx::array>& given, const std::vector<mx::array>& known) {
    return std::equal(given.begin(), given.end(), known.begin(), known.end(), [](const auto& one, const auto& other) {
      return one.id() == other.id();
    });
  });
  m.def("traced", [](const std::vector<mx::array>& arrays) {
    return std::any_of(arrays.begin(), arrays.end(), [](const mx::array& each) { return each.is_tracer(); });
  });
  m.def(
      "composed_attention",
      [](const mx::array& q, const mx::array& k, const mx::array& v, nb::handle options, const mx::Stream& on) {
        return mlx_cuda::composed_attention(
            mlx_cuda::arrays_of(q, k, v, options), mlx_cuda::options_of(options).with_lse(true), on);
      });
  m.def("layout_for_upstream", [](const mx::array& in, std::uintptr_t past, bool weights) {
    return static_cast<int>(mlx_cuda::layout_for_upstream(in.shape(), in.strides(), 256 + past, weights));
  });
}
