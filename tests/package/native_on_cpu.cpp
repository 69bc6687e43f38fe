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

NB_MODULE(native_on_cpu, m) {
  nb::module_::import_("mlx.core");  // registers array and Stream

  mlx_cuda::bind_call_cache(m);
  mlx_cuda::bind_watch(m);
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
