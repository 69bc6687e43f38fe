#include "decoding/persistent/persistent.h"

#include "decoding/persistent/params.h"
#include "decoding/persistent/runs.h"
#include "runtime/device_code.h"
#include "runtime/kernel_table.h"
#include "runtime/memory.h"
#include "runtime/node.h"
#include "runtime/pdl.h"

#include <mlx/ops.h>
#include <mlx/transforms.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace mlx_cuda {

namespace {

using Params = PersistentParams;

// Bytes that are on their way to a multiprocessor: measured on an H100. More delay the results that blocks hand over.
constexpr int kInFlight = 46080;
// Left free on a multiprocessor for blocks of attention between the runs, so that they begin before this one ends.
constexpr int kLeftBytes = 32 << 10;

// The memory by which the results of a run are handed over: of all runs one array, each with its part of it. Its elements are set
// to kUnset by the next run of the graph.
struct Handoff {
  mx::array memory;
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
PersistentGemv parameters_of(GemvCall& call, KernelNode& node) {
  PersistentGemv g{};
  const OneGemv& first = call.parts[0];
  const Division division = divide(first);
  g.norm = node.reads(call.norm);
  g.eps = call.eps;
  g.bits = first.form->bits;
  g.inner = first.inner;
  g.slot_values = division.slot_values;
  g.chunk_slots = ceil_div(g.inner, g.slot_values);
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
void divide_memory(Params& params, const Run& run) {
  for (int i = 0; i < params.count; ++i) {
    const PersistentGemv& g = params.gemv[i];
    params.most_inner = std::max(params.most_inner, g.turns * Params::padded(g.inner));
    params.slot_bytes = std::max(params.slot_bytes, g.quads > 0 ? divide(run[i].gemv.parts[0]).slot_bytes() : 0);
  }
  for (int i = 0; i < params.attentions; ++i) {
    params.attention_rows = std::max(params.attention_rows, params.attention[i].token.rows);
  }
  const int left = params.attentions > 0 ? 0 : kLeftBytes;
  params.slots = 1;
  const int of_slot = params.slot_bytes + Params::kSlotState;
  const int fixed = params.shared_bytes() - of_slot;
  params.slots = std::min((shared_memory_limit() - left - fixed) / of_slot, Params::kMostSlots);
  for (int i = 0; i < params.count; ++i) {
    params.gemv[i].in_flight = std::clamp(kInFlight / divide(run[i].gemv.parts[0]).slot_bytes(), 1, params.slots);
  }
}

// Of all results of a call, one after another.
std::size_t result_bytes_of(const GemvCall& call) {
  std::size_t bytes = 0;
  for (const mx::array& out : call.outputs) {
    bytes += out.nbytes();
  }
  return aligned(bytes);
}

std::size_t partial_bytes(const TokenCall& token) {
  const int rows = token.heads.keys.count * ceil_div(token.heads.queries.count / token.heads.keys.count, TokenTraits::kMostRows) *
                   TokenTraits::kMostRows;
  return aligned(static_cast<std::size_t>(rows) * parts_of(token) * PersistentAttention::kPitch * sizeof(float));
}

// Bytes of counters and handed over results, at most.
std::size_t handoff_bytes(const Run& run) {
  std::size_t bytes = Params::kCounters * Params::kCounterBytes;
  for (const Instruction& each : run) {
    bytes += result_bytes_of(each.gemv) + (each.token ? partial_bytes(*each.token) + aligned(each.token->out.nbytes()) : 0);
  }
  return bytes;
}

// Fills in the parameters of a run, whose arrays are allocated and readable.
class Filling {
 public:
  Filling(Run& run, Params& params, KernelNode& node, char* handoff)
      : run_(run), params_(params), node_(node), free_(handoff + Params::kCounters * Params::kCounterBytes) {}

  void fill() {
    params_.count = static_cast<int>(run_.size());
    int routers = 0;
    for (std::size_t i = 0; i < run_.size(); ++i) {
      Instruction& instruction = run_[i];
      PersistentGemv g = parameters_of(instruction.gemv, node_);
      g.router = g.x_from = g.added_from = -1;
      g.same_x = with_experts(run_) && same_x(run_, i);
      if (const auto x = giver(run_, instruction.gemv.x, i)) {
        g.x_from = x->instruction;
        g.x = params_.gemv[x->instruction].handoff;
      }
      if (instruction.token) {
        g.x_from = Params::kMost + params_.attentions;
        g.x = fill(*instruction.token, params_.attention[params_.attentions++], i);
      }
      if (g.x_from < 0) {
        g.x = node_.reads(instruction.gemv.x);
      }
      if (const auto added = instruction.gemv.added ? giver(run_, *instruction.gemv.added, i) : std::nullopt) {
        g.added_from = added->instruction;
        g.added = params_.gemv[added->instruction].handoff;
      } else {
        g.added = node_.reads(instruction.gemv.added);
      }
      if (instruction.router) {
        g.router = routers++;
        fill(*instruction.router, params_.router[g.router], i);
      }
      if (is_read(run_, i)) {
        g.handoff = free_;
        free_ += result_bytes_of(instruction.gemv);
      }
      params_.gemv[i] = g;
    }
  }

 private:
  // Gives where the result is.
  void* fill(TokenCall& token, PersistentAttention& to, std::size_t instruction) {
    to.token = token_params(token, node_);
    const mx::array* rows[] = {&token.heads.queries.rows, &token.heads.keys.rows, &token.heads.values};
    for (int i = 0; i < 3; ++i) {
      const Giver from = *giver(run_, *rows[i], instruction);
      const PersistentGemv& g = params_.gemv[from.instruction];
      to.rows_from = from.instruction;
      to.token.heads.rows[i] = static_cast<char*>(g.handoff) + g.part[from.output].first * Params::kQuadRows * rows[i]->itemsize();
    }
    to.parts = parts_of(token);
    to.partial = reinterpret_cast<float*>(free_);
    free_ += partial_bytes(token);
    to.token.decode.out = free_;
    free_ += aligned(token.out.nbytes());
    return to.token.decode.out;
  }

  void fill(RouterCall& router, PersistentRouter& to, std::size_t instruction) {
    to.params = router.params;
    to.logits_from = giver(run_, router.logits, instruction)->instruction;
    to.params.logits = params_.gemv[to.logits_from].handoff;
    to.params.chosen = node_.writes<unsigned>(router.chosen);
    to.params.scores = node_.writes(router.scores);
  }

  Run& run_;
  Params& params_;
  KernelNode& node_;
  char* free_;  // of the handoff memory
};

// Copies and allocations come before the node.
void make_ready(Run& run, const mx::Stream& stream) {
  auto& encoder = mx::cu::get_command_encoder(stream);
  for (std::size_t i = 0; i < run.size(); ++i) {
    Instruction& instruction = run[i];
    if (instruction.token) {
      make_readable(*instruction.token, stream);
    } else if (!giver(run, instruction.gemv.x, i)) {
      instruction.gemv.x = contiguous_on_16_bytes(instruction.gemv.x, encoder, stream);
    }
    if (instruction.gemv.added && !giver(run, *instruction.gemv.added, i)) {
      instruction.gemv.added = contiguous_on_16_bytes(*instruction.gemv.added, encoder, stream);
    }
    for (mx::array& out : instruction.gemv.outputs) {
      allocate(out, stream);
    }
    if (instruction.router) {
      allocate(instruction.router->chosen, stream);
      allocate(instruction.router->scores, stream);
    }
  }
}

void launch(Run run, Handoff handoff, const mx::Stream& stream) {
  make_ready(run, stream);
  KernelNode node(mx::cu::get_command_encoder(stream));
  char* const memory = node.writes<char>(handoff.memory);
  Params params{};
  params.arrived = reinterpret_cast<int*>(memory + handoff.begin);
  params.cleared = memory + handoff.cleared_begin;
  params.cleared_bytes = static_cast<int>(handoff.cleared_end - handoff.cleared_begin);
  Filling(run, params, node, memory + handoff.begin).fill();
  divide_memory(params, run);
  static KernelModule kernels("persistent_sm90");
  static constexpr auto table =
      std::to_array<KernelRow<std::string_view, bool>>({MLX_CUDA_PERSISTENT_KERNELS(MLX_CUDA_KERNEL_ROW)});
  CUfunction kernel =
      with_all_blocks(with_pdl(kernels.function(kernel_for(table, type_name(run[0].gemv.x.dtype()), with_experts(run)))));
  const int threads = with_experts(run) ? PersistentShape<true>::kThreads : PersistentShape<false>::kThreads;
  node.launch(kernel, dim3(multiprocessors()), threads, params.shared_bytes(), params);
}

Item item_of(const Run& run, const Handoff& handoff) {
  Item item{"persistent: " + name_of(run), {}, {}, [run, handoff](const mx::Stream& stream) { launch(run, handoff, stream); }};
  for (const Instruction& each : run) {
    const Arrays outputs = each.outputs();
    item.outputs.insert(item.outputs.end(), outputs.begin(), outputs.end());
  }
  for (const Instruction& each : run) {
    for (const mx::array& in : each.inputs()) {
      const bool own =
          std::any_of(item.outputs.begin(), item.outputs.end(), [&](const mx::array& out) { return out.id() == in.id(); });
      if (!own) {
        item.inputs.push_back(in);
      }
    }
  }
  return item;
}

}  // namespace

void fuse_runs(Plan& plan, const PersistentCalls& calls, const mx::Stream& stream) {
  if (!is_hopper()) {
    return;
  }
  auto runs = runs_of(plan, calls, Params::kMost);
  if (runs.size() == 1) {
    runs = runs_of(plan, calls, (runs[0].size() + 1) / 2);
  }
  if (runs.size() < 2) {  // a run is cleared by another one
    return;
  }
  std::vector<std::size_t> begins{0};
  for (const Run& run : runs) {
    begins.push_back(begins.back() + handoff_bytes(run));
  }
  mx::array memory = mx::full({static_cast<int>(begins.back() / 4)}, Params::kUnset, mx::int32, stream);
  memory.eval();
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const std::size_t before = (i + runs.size() - 1) % runs.size();
    Item item = item_of(runs[i], {memory, begins[i], begins[i + 1], begins[before], begins[before + 1]});
    if (i == 0) {
      item.outputs.push_back(memory);  // which the captured step keeps then
    }
    plan.replace(std::move(item));
  }
}

}  // namespace mlx_cuda
