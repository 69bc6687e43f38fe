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
#include <memory>
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

  int slot_bytes() const {
    return Params::slot_bytes_of(Params::kQuadRows * Params::kTeamWarps >> split_shift, slot_values);
  }
};

Division divide(int inner) {
  constexpr int most_shift = std::countr_zero(static_cast<unsigned>(Params::kTeamWarps));
  for (int shift = 0; shift <= most_shift; ++shift) {
    if (const Division whole{shift, inner}; whole.slot_bytes() <= kMostSlotBytes) {
      return whole;
    }
  }
  const int most = kMostSlotBytes / Params::slot_bytes_of(Params::kQuadRows, Params::kPairValues);  // pairs of groups
  const int pairs = inner / Params::kPairValues;
  return {most_shift, ceil_div(pairs, ceil_div(pairs, most)) * Params::kPairValues};
}

// Whether the kernel takes such a call.
bool fits(const GemvCall& call) {
  const int row_multiple = is_gated(call.epilogue) ? Params::kQuadRows / 2 : Params::kQuadRows;
  return std::all_of(call.parts.begin(), call.parts.end(), [&](const OneGemv& gemv) {
    const bool affine4 = gemv.form && gemv.form->mode == "affine" && gemv.form->bits == 4;
    return affine4 && gemv.form->group_size == Params::kGroup && !gemv.chosen &&
           gemv.x.size() == static_cast<std::size_t>(gemv.inner) && gemv.inner % Params::kPairValues == 0 &&
           gemv.inner <= Params::kMostInner && gemv.columns % row_multiple == 0 && is_aligned(gemv.w, 0, 16) &&
           is_aligned(*gemv.scales, 0, 16) && is_aligned(*gemv.biases, 0, 16);
  });
}

// A run, and the memory by which its results are handed over: of all runs one array, each with its part of it. Its elements are
// set to kUnset by the next run of the graph.
struct Run {
  std::vector<GemvCall> calls;
  mx::array handoff;
  std::size_t begin = 0;  // bytes
  std::size_t end = 0;
  std::size_t cleared_begin = 0;
  std::size_t cleared_end = 0;

  // Which of its calls gives an array; -1: none.
  int giver(const mx::array& of, std::size_t before) const {
    for (std::size_t i = 0; i < before; ++i) {
      if (calls[i].outputs.size() == 1 && calls[i].outputs[0].id() == of.id()) {
        return static_cast<int>(i);
      }
    }
    return -1;
  }
};

constexpr std::size_t kAlign = 128;

std::size_t aligned(std::size_t bytes) {
  return (bytes + kAlign - 1) / kAlign * kAlign;
}

void launch(const Run& run, const mx::Stream& stream) {
  auto& encoder = mx::cu::get_command_encoder(stream);
  std::vector<GemvCall> calls = run.calls;
  Params params{};
  params.count = static_cast<int>(calls.size());
  std::vector<int> x_from(calls.size());
  std::vector<int> added_from(calls.size());
  for (std::size_t i = 0; i < calls.size(); ++i) {  // copies and allocations come before the node
    GemvCall& call = calls[i];
    x_from[i] = run.giver(call.x, i);
    added_from[i] = call.added ? run.giver(*call.added, i) : -1;
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

  KernelNode node(encoder);
  mx::array handoff = run.handoff;
  char* const memory = node.writes<char>(handoff);
  params.arrived = reinterpret_cast<int*>(memory + run.begin);
  params.cleared = memory + run.cleared_begin;
  params.cleared_bytes = static_cast<int>(run.cleared_end - run.cleared_begin);
  std::size_t at = run.begin + calls.size() * Params::kCounterBytes;
  for (std::size_t i = 0; i < calls.size(); ++i) {
    GemvCall& call = calls[i];
    PersistentGemv& g = params.gemv[i];
    g.norm = node.reads(call.norm);
    g.x_from = x_from[i];
    g.x = g.x_from >= 0 ? params.gemv[g.x_from].handoff : node.reads(call.x);
    g.added_from = added_from[i];
    g.added = g.added_from >= 0 ? params.gemv[g.added_from].handoff : node.reads(call.added);
    g.eps = call.eps;
    g.inner = call.parts[0].inner;
    const Division division = divide(g.inner);
    g.split_shift = division.split_shift;
    g.slot_values = division.slot_values;
    g.epilogue = call.epilogue;
    g.parts = static_cast<int>(call.parts.size());
    const int quad_rows = is_gated(g.epilogue) ? Params::kQuadRows / 2 : Params::kQuadRows;
    int quads = 0;
    for (int j = 0; j < g.parts; ++j) {
      const OneGemv& from = call.parts[j];
      g.part[j] = {node.reads(from.w), node.reads(from.scales), node.reads(from.biases), nullptr, from.columns, quads};
      quads += from.columns / quad_rows;
    }
    g.quads = is_gated(g.epilogue) ? call.parts[0].columns / quad_rows : quads;
    for (std::size_t j = 0; j < call.outputs.size(); ++j) {
      g.part[j].out = node.writes(call.outputs[j]);
    }
    const bool read = std::any_of(calls.begin() + static_cast<std::ptrdiff_t>(i) + 1, calls.end(), [&](const GemvCall& later) {
      const auto given = [&](const mx::array& in) { return call.outputs.size() == 1 && in.id() == call.outputs[0].id(); };
      return given(later.x) || (later.added && given(*later.added));
    });
    if (read) {
      g.handoff = memory + at;
      at += aligned(call.outputs[0].nbytes());
    }
    params.most_inner = std::max(params.most_inner, g.inner);
    params.slot_bytes = std::max(params.slot_bytes, division.slot_bytes());
  }
  params.slots = 1;
  const int fixed = params.shared_bytes() - (params.slot_bytes + 16);
  params.slots = std::min((shared_memory_limit() - kLeftBytes - fixed) / (params.slot_bytes + 16), Params::kMostSlots);
  params.in_flight = std::clamp(kInFlight / params.slot_bytes, 1, params.slots);
  static KernelModule kernels("persistent_sm90");
  static constexpr auto table = std::to_array<KernelRow<std::string_view>>({MLX_CUDA_PERSISTENT_KERNELS(MLX_CUDA_KERNEL_ROW)});
  CUfunction kernel = with_all_blocks(with_pdl(kernels.function(kernel_for(table, type_name(calls[0].x.dtype())))));
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

std::string name_of(const std::vector<GemvCall>& calls) {
  std::string name = "persistent: ";
  for (const GemvCall& call : calls) {
    name += (&call == &calls[0] ? "" : "; ") + call.name();
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

// The runs of GEMVs that follow one another, of at least two.
std::vector<std::vector<GemvCall>> runs_of(const Plan& plan, const GemvCalls& calls) {
  std::vector<std::vector<GemvCall>> runs(1);
  for (const Item* item : plan.order()) {
    const auto found = calls.find(item);
    std::vector<GemvCall>& last = runs.back();
    if (found == calls.end() || !fits(found->second)) {
      if (!last.empty() && !is_view(*item)) {
        runs.emplace_back();
      }
      continue;
    }
    GemvCall call = found->second;
    call.x = source_of(plan, call.x);
    if (call.added) {
      call.added = source_of(plan, *call.added);
    }
    if (last.size() == Params::kMost || reads_one_of_several(call, last) ||
        (!last.empty() && last[0].x.dtype() != call.x.dtype())) {
      runs.emplace_back();
    }
    runs.back().push_back(std::move(call));
  }
  std::erase_if(runs, [](const auto& run) { return run.size() < 2; });
  return runs;
}

}  // namespace

void fuse_runs(Plan& plan, const GemvCalls& calls, const mx::Stream& stream) {
  auto runs = runs_of(plan, calls);
  if (!is_hopper() || runs.size() < 2) {  // a run is cleared by another one
    return;
  }
  std::vector<std::size_t> begins{0};
  for (const auto& run : runs) {
    begins.push_back(begins.back() + handoff_bytes(run));
  }
  mx::array handoff = mx::full({static_cast<int>(begins.back() / 4)}, Params::kUnset, mx::int32, stream);
  handoff.eval();
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const std::size_t before = (i + runs.size() - 1) % runs.size();
    Arrays inputs;
    Arrays outputs;
    Run run{std::move(runs[i]), handoff, begins[i], begins[i + 1], begins[before], begins[before + 1]};
    for (const GemvCall& call : run.calls) {
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
