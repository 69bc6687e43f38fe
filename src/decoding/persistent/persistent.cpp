#include "decoding/persistent/persistent.h"

#include "decoding/graph/views.h"
#include "decoding/persistent/params.h"
#include "runtime/device_code.h"
#include "runtime/kernel_table.h"
#include "runtime/memory.h"
#include "runtime/node.h"
#include "runtime/pdl.h"

#include <mlx/ops.h>
#include <mlx/transforms.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace mlx_cuda {

namespace {

using Params = PersistentParams;

// Bytes that are on their way to a multiprocessor: measured on an H100. More delay the results that blocks hand over.
constexpr int kInFlight = 46080;
// Of a slot: 16 rows of 2560 values.
constexpr int kMostSlotBytes = 23040;
// Left free on a multiprocessor for blocks of other kernels, so that they begin before this one ends.
constexpr int kLeftBytes = 32 << 10;

// How an instruction's weights are divided among slots and warps.
struct Division {
  int split_shift;
  int slot_values;

  int quads() const {  // of a slot
    return Params::kTeamWarps >> split_shift;
  }
  int slot_bytes() const {
    return Params::slot_bytes_of(Params::kQuadRows * quads(), slot_values);
  }
};

Division divide(const OneGemv& gemv) {
  constexpr int most_shift = std::countr_zero(static_cast<unsigned>(Params::kTeamWarps));
  for (int shift = 0; shift <= most_shift; ++shift) {
    if (const Division whole{shift, gemv.inner}; whole.slot_bytes() <= kMostSlotBytes || gemv.each_its_row()) {
      return whole;
    }
  }
  const int most = kMostSlotBytes / Params::slot_bytes_of(Params::kQuadRows, Params::kPairValues);  // pairs of groups
  const int pairs = gemv.inner / Params::kPairValues;
  return {most_shift, ceil_div(pairs, ceil_div(pairs, most)) * Params::kPairValues};
}

// GEMVs that follow one another in a step, and the router between them.
struct Calls {
  std::vector<GemvCall> gemvs{};
  std::optional<RouterCall> router{};

  // Which of the first ones gives an array alone; -1: none.
  int giver(const mx::array& of, std::size_t before) const {
    for (std::size_t i = 0; i < before; ++i) {
      if (gemvs[i].outputs.size() == 1 && gemvs[i].outputs[0].id() == of.id()) {
        return static_cast<int>(i);
      }
    }
    return -1;
  }
  bool gives(const mx::array& of) const {
    return giver(of, gemvs.size()) >= 0;
  }
  // The first one that the router chooses for; -1: none.
  int router_at() const {
    const auto chosen = std::find_if(gemvs.begin(), gemvs.end(), [](const GemvCall& call) { return call.parts[0].chosen; });
    return router && chosen != gemvs.end() ? static_cast<int>(chosen - gemvs.begin()) : -1;
  }
  // Whether the kernel with a router is needed, or the one that is faster without it.
  bool with_experts() const {
    return router || std::any_of(gemvs.begin(), gemvs.end(), [](const GemvCall& call) { return call.parts[0].form->bits != 4; });
  }
  // Whether a later one reads the result of one.
  bool reads(std::size_t of) const {
    const auto given = [&](const mx::array& in) { return gemvs[of].outputs.size() == 1 && in.id() == gemvs[of].outputs[0].id(); };
    return (router && given(router->logits)) ||
           std::any_of(gemvs.begin() + static_cast<std::ptrdiff_t>(of) + 1, gemvs.end(), [&](const GemvCall& later) {
             return given(later.x) || (later.added && given(*later.added));
           });
  }
  // Whether one has the x of the one before.
  bool same_x(std::size_t index) const {
    const auto id = [](const MaybeArray& array) { return array ? array->id() : 0; };
    if (index == 0) {
      return false;
    }
    const GemvCall& own = gemvs[index];
    const GemvCall& before = gemvs[index - 1];
    return !before.factors && own.x.id() == before.x.id() && id(own.norm) == id(before.norm) && own.eps == before.eps;
  }
};

bool experts_fit(const GemvCall& call, const Calls& before) {
  const OneGemv& gemv = call.parts[0];
  if (!before.router || before.router->chosen.id() != gemv.chosen->id()) {
    return false;
  }
  if (!gemv.each_its_row()) {
    return is_gated(call.epilogue) && gemv.inner % Params::kPairValues == 0 && gemv.inner <= Params::kMostInner;
  }
  return before.router_at() >= 0 && call.factors && call.factors->id() == before.router->scores.id() &&
         gemv.inner % Params::kTurnMultiple == 0 && divide(gemv).slot_bytes() <= kMostSlotBytes &&
         gemv.count() * Params::padded(gemv.inner) <= Params::kMostInner;
}

// Whether the kernel takes such a call after others.
bool fits(const GemvCall& call, const Calls& before) {
  const OneGemv& first = call.parts[0];
  if (!first.form) {
    return false;
  }
  const int row_multiple = is_gated(call.epilogue) || first.form->bits == 8 ? Params::kQuadRows / 2 : Params::kQuadRows;
  const bool alike = std::all_of(call.parts.begin(), call.parts.end(), [&](const OneGemv& gemv) {
    return gemv.form && gemv.form->mode == "affine" && gemv.form->group_size == Params::kGroup &&
           gemv.columns % row_multiple == 0 && is_aligned(gemv.w, 0, 16) && is_aligned(*gemv.scales, 0, 16) &&
           is_aligned(*gemv.biases, 0, 16);
  });
  if (!alike) {
    return false;
  }
  if (first.chosen) {
    return first.form->bits == 4 && experts_fit(call, before);
  }
  const bool few = call.parts.size() == 1 && call.epilogue == GemvEpilogue::none && first.columns <= RouterParams::kMostExperts;
  return (first.form->bits == 4 || (first.form->bits == 8 && few)) && first.x.size() == static_cast<std::size_t>(first.inner) &&
         first.inner % Params::kPairValues == 0 && first.inner <= Params::kMostInner;
}

// Calls, and the memory by which their results are handed over: of all runs one array, each with its part of it. Its elements are
// set to kUnset by the next run of the graph.
struct Run {
  Calls calls;
  mx::array handoff;
  std::size_t begin = 0;  // bytes
  std::size_t end = 0;
  std::size_t cleared_begin = 0;
  std::size_t cleared_end = 0;
};

constexpr std::size_t kAlign = 128;

std::size_t aligned(std::size_t bytes) {
  return (bytes + kAlign - 1) / kAlign * kAlign;
}

// The instruction of a call, without what others hand over.
PersistentGemv instruction_of(GemvCall& call, KernelNode& node) {
  PersistentGemv g{};
  const OneGemv& first = call.parts[0];
  const Division division = divide(first);
  g.norm = node.reads(call.norm);
  g.eps = call.eps;
  g.bits = first.form->bits;
  g.inner = first.inner;
  g.slot_values = division.slot_values;
  g.split_shift = division.split_shift;
  g.epilogue = call.epilogue;
  g.turns = first.each_its_row() ? first.count() : 1;
  g.parts = static_cast<int>(call.parts.size());
  const int quad_rows = is_gated(g.epilogue) ? Params::kQuadRows / 2 : Params::kQuadRows;
  int quads = 0;
  for (int j = 0; j < g.parts; ++j) {
    const OneGemv& from = call.parts[j];
    g.part[j] = {node.reads(from.w), node.reads(from.scales), node.reads(from.biases), nullptr, from.columns, quads};
    quads += from.columns / quad_rows;
  }
  g.quads = g.bits == 8 ? 0 : is_gated(g.epilogue) ? first.columns / quad_rows : quads;
  g.share_quads = 1;
  if (first.chosen && g.turns == 1) {
    g.expert_quads = g.quads;
    g.quads *= first.count();
    g.share_quads = division.quads();  // which the rows of an expert, a multiple of eight, have a whole number of
  }
  for (std::size_t j = 0; j < call.outputs.size(); ++j) {
    g.part[j].out = node.writes(call.outputs[j]);
  }
  return g;
}

// Of all instructions, how shared memory is divided.
void divide_memory(Params& params, const std::vector<GemvCall>& calls) {
  for (int i = 0; i < params.count; ++i) {
    const PersistentGemv& g = params.gemv[i];
    params.most_inner = std::max(params.most_inner, g.turns * Params::padded(g.inner));
    params.slot_bytes = std::max(params.slot_bytes, g.quads > 0 ? divide(calls[i].parts[0]).slot_bytes() : 0);
  }
  params.slots = 1;
  const int fixed = params.shared_bytes() - (params.slot_bytes + 16);
  params.slots = std::min((shared_memory_limit() - kLeftBytes - fixed) / (params.slot_bytes + 16), Params::kMostSlots);
  for (int i = 0; i < params.count; ++i) {
    params.gemv[i].in_flight = std::clamp(kInFlight / divide(calls[i].parts[0]).slot_bytes(), 1, params.slots);
  }
}

void launch(const Run& run, const mx::Stream& stream) {
  auto& encoder = mx::cu::get_command_encoder(stream);
  Calls calls = run.calls;
  Params params{};
  params.count = static_cast<int>(calls.gemvs.size());
  std::vector<int> x_from(calls.gemvs.size());
  std::vector<int> added_from(calls.gemvs.size());
  for (std::size_t i = 0; i < calls.gemvs.size(); ++i) {  // copies and allocations come before the node
    GemvCall& call = calls.gemvs[i];
    x_from[i] = calls.giver(call.x, i);
    added_from[i] = call.added ? calls.giver(*call.added, i) : -1;
    if (x_from[i] < 0) {
      call.x = contiguous_on_16_bytes(call.x, encoder, stream);
    }
    if (call.added && added_from[i] < 0) {
      call.added = contiguous_on_16_bytes(*call.added, encoder, stream);
    }
    for (mx::array& out : call.outputs) {
      allocate(out, stream);
    }
  }
  params.router_at = calls.router_at();
  if (calls.router) {
    allocate(calls.router->chosen, stream);
    allocate(calls.router->scores, stream);
  }

  KernelNode node(encoder);
  mx::array handoff = run.handoff;
  char* const memory = node.writes<char>(handoff);
  params.arrived = reinterpret_cast<int*>(memory + run.begin);
  params.cleared = memory + run.cleared_begin;
  params.cleared_bytes = static_cast<int>(run.cleared_end - run.cleared_begin);
  std::size_t at = run.begin + calls.gemvs.size() * Params::kCounterBytes;
  for (std::size_t i = 0; i < calls.gemvs.size(); ++i) {
    GemvCall& call = calls.gemvs[i];
    PersistentGemv& g = params.gemv[i] = instruction_of(call, node);
    g.same_x = calls.with_experts() && run.calls.same_x(i);
    g.x_from = x_from[i];
    g.x = g.x_from >= 0 ? params.gemv[g.x_from].handoff : node.reads(call.x);
    g.added_from = added_from[i];
    g.added = g.added_from >= 0 ? params.gemv[g.added_from].handoff : node.reads(call.added);
    if (calls.reads(i)) {
      g.handoff = memory + at;
      at += aligned(call.outputs[0].nbytes());
    }
  }
  if (calls.router) {
    params.logits_from = calls.giver(calls.router->logits, calls.gemvs.size());
    params.router = calls.router->params;
    params.router.logits = params.gemv[params.logits_from].handoff;
    params.router.chosen = node.writes<unsigned>(calls.router->chosen);
    params.router.scores = node.writes(calls.router->scores);
  }
  divide_memory(params, calls.gemvs);
  static KernelModule kernels("persistent_sm90");
  static constexpr auto table =
      std::to_array<KernelRow<std::string_view, bool>>({MLX_CUDA_PERSISTENT_KERNELS(MLX_CUDA_KERNEL_ROW)});
  CUfunction kernel =
      with_all_blocks(with_pdl(kernels.function(kernel_for(table, type_name(calls.gemvs[0].x.dtype()), calls.with_experts()))));
  node.launch(kernel, dim3(multiprocessors()), Params::kThreads, params.shared_bytes(), params);
}

// Bytes of counters and handed over results, at most.
std::size_t handoff_bytes(const std::vector<GemvCall>& calls) {
  std::size_t bytes = calls.size() * Params::kCounterBytes;
  for (const GemvCall& call : calls) {
    bytes += call.outputs.size() == 1 ? aligned(call.outputs[0].nbytes()) : 0;
  }
  return bytes;
}

std::string name_of(const Calls& calls) {
  std::string name = "persistent: ";
  for (std::size_t i = 0; i < calls.gemvs.size(); ++i) {
    name +=
        (i == 0 ? "" : "; ") + (calls.router_at() == static_cast<int>(i) ? std::string("router; ") : "") + calls.gemvs[i].name();
  }
  return name;
}

// Whether a call reads one of several results of an earlier call: only single ones are handed over.
bool reads_one_of_several(const GemvCall& call, const std::vector<GemvCall>& run) {
  return std::any_of(run.begin(), run.end(), [&](const GemvCall& earlier) {
    return earlier.outputs.size() > 1 && std::any_of(earlier.outputs.begin(), earlier.outputs.end(), [&](const mx::array& out) {
             return out.id() == call.x.id() || (call.added && out.id() == call.added->id());
           });
  });
}

// Whether a router can be between the calls before it and others.
bool router_fits(const RouterCall& router, const Calls& before) {
  return !before.router && before.gives(router.logits) && router.params.experts % 2 == 0 &&
         router.logits.dtype() == before.gemvs[0].x.dtype();
}

// The runs of calls that follow one another, of at least two GEMVs.
std::vector<Calls> runs_of(const Plan& plan, const PersistentCalls& calls) {
  std::vector<Calls> runs(1);
  const auto end_run = [&] {
    if (!runs.back().gemvs.empty()) {
      runs.emplace_back();
    }
  };
  for (const Item* item : plan.order()) {
    const auto router = calls.routers.find(item);
    if (router != calls.routers.end() && router_fits(router->second, runs.back())) {
      runs.back().router = router->second;
      continue;
    }
    const auto found = calls.gemvs.find(item);
    if (found == calls.gemvs.end()) {
      if (!is_view(*item)) {
        end_run();
      }
      continue;
    }
    GemvCall call = found->second;
    call.x = source_of(plan, call.x);
    if (call.added) {
      call.added = source_of(plan, *call.added);
    }
    const std::vector<GemvCall>& last = runs.back().gemvs;
    if (last.size() == Params::kMost || reads_one_of_several(call, last) ||
        (!last.empty() && last[0].x.dtype() != call.x.dtype())) {
      end_run();
    }
    if (fits(call, runs.back())) {
      runs.back().gemvs.push_back(std::move(call));
    } else {
      end_run();
    }
  }
  for (Calls& run : runs) {
    if (run.router_at() < 0) {
      run.router.reset();  // a kernel of its own after the run
    }
  }
  std::erase_if(runs, [](const Calls& run) { return run.gemvs.size() < 2; });
  return runs;
}

}  // namespace

void fuse_runs(Plan& plan, const PersistentCalls& calls, const mx::Stream& stream) {
  if (!is_hopper()) {
    return;
  }
  auto runs = runs_of(plan, calls);
  if (runs.size() < 2) {  // a run is cleared by another one
    return;
  }
  std::vector<std::size_t> begins{0};
  for (const Calls& run : runs) {
    begins.push_back(begins.back() + handoff_bytes(run.gemvs));
  }
  mx::array handoff = mx::full({static_cast<int>(begins.back() / 4)}, Params::kUnset, mx::int32, stream);
  handoff.eval();
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const std::size_t before = (i + runs.size() - 1) % runs.size();
    Arrays inputs;
    Arrays outputs;
    Run run{std::move(runs[i]), handoff, begins[i], begins[i + 1], begins[before], begins[before + 1]};
    if (run.calls.router) {
      outputs = {run.calls.router->chosen, run.calls.router->scores};
    }
    for (const GemvCall& call : run.calls.gemvs) {
      for (const mx::array& in : call.inputs()) {
        const bool own = std::any_of(outputs.begin(), outputs.end(), [&](const mx::array& out) { return out.id() == in.id(); });
        if (!own) {
          inputs.push_back(in);
        }
      }
      outputs.insert(outputs.end(), call.outputs.begin(), call.outputs.end());
    }
    if (i == 0) {
      outputs.push_back(handoff);  // which the step keeps then
    }
    const std::string name = name_of(run.calls);
    plan.replace({name, inputs, outputs, [run = std::move(run)](const mx::Stream& stream) { launch(run, stream); }});
  }
}

}  // namespace mlx_cuda
