// What fusion recognizes in a graph, for tests: plans of graphs that run on the CPU, in which matmuls are the step's inputs.
#include "decoding/fusion/gates.h"
#include "decoding/graph/views.h"

#include <mlx/primitives.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <optional>
#include <string>
#include <tuple>

namespace mx = mlx::core;
namespace nb = nanobind;
using namespace nb::literals;

namespace mlx_cuda {

// As src/decoding/graph/plan.cpp does it, without running anything.
Plan::Plan(const mx::array& result) : result_(result) {
  std::unordered_map<std::uintptr_t, bool> depends;
  const std::function<bool(const mx::array&)> visit = [&](const mx::array& array) {
    if (const auto seen = depends.find(array.id()); seen != depends.end()) {
      return seen->second;
    }
    bool needed = array.has_primitive() && std::string(array.primitive().name()) == "Matmul";
    if (array.has_primitive()) {
      for (const mx::array& in : array.inputs()) {
        needed = visit(in) || needed;
      }
    }
    for (const mx::array& out : array.has_primitive() ? array.outputs() : std::vector<mx::array>{array}) {
      depends[out.id()] = needed;
    }
    if (needed) {
      replace({array.primitive().name(), array.inputs(), array.outputs(), {}});
      for (const mx::array& in : array.inputs()) {
        readers_[in.id()].push_back(&items_.back());
      }
    }
    return needed;
  };
  visit(result);
}

void Plan::replace(Item item) {
  items_.push_back(std::move(item));
  for (const mx::array& out : items_.back().outputs) {
    givers_[out.id()] = &items_.back();
  }
}

const Item* Plan::giver(const mx::array& of) const {
  const auto found = givers_.find(of.id());
  return found == givers_.end() ? nullptr : found->second;
}

const std::vector<const Item*>& Plan::readers(const mx::array& of) const {
  static const std::vector<const Item*> none;
  const auto found = readers_.find(of.id());
  return found == readers_.end() ? none : found->second;
}

namespace {

// The name of the activation, and which of two matmuls is the gate, of what is made of both.
std::optional<std::tuple<std::string, int>> gate(const mx::array& result, const mx::array& one, const mx::array& other) {
  const Plan plan(result);
  Gates gates(plan);
  const auto is = [&](const mx::array& array, const mx::array& as) { return array.id() == source_of(plan, as).id(); };
  const auto matmuls = [&](const mx::array& a, const mx::array& b) {
    return (is(a, one) && is(b, other)) || (is(a, other) && is(b, one));
  };
  for (const mx::array& up : {one, other}) {
    if (const auto found = gates.read_by(source_of(plan, up), matmuls)) {
      const char* names[] = {"", "", "swiglu", "geglu", "geglu_tanh"};
      return std::tuple(std::string(names[static_cast<int>(found->activation)]), is(found->gate, one) ? 0 : 1);
    }
  }
  return std::nullopt;
}

bool adds(const mx::array& result, const mx::array& matmul) {
  const Plan plan(result);
  const Item* reader = reader_of(plan, matmul);
  return reader && added_to(plan, *reader, matmul).has_value();
}

bool is_silu(const mx::array& result) {
  const Plan plan(result);
  const Item* item = plan.giver(result);
  return item && Gates(plan).is_silu(*item);
}

}  // namespace

}  // namespace mlx_cuda

NB_MODULE(fusion_on_cpu, m) {
  nb::module_::import_("mlx.core");  // registers array
  m.def("gate", &mlx_cuda::gate, "result"_a, "one"_a, "other"_a);
  m.def("is_silu", &mlx_cuda::is_silu, "result"_a);
  m.def("adds", &mlx_cuda::adds, "result"_a, "matmul"_a);
}
