#include "decoding/persistent/runs.h"

#include "decoding/graph/views.h"
#include "decoding/persistent/params.h"
#include "runtime/device_code.h"
#include "runtime/memory.h"
#include "runtime/node.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace mlx_cuda {

namespace {

using Params = PersistentParams;

// Of a slot: 16 rows of 2560 values.
constexpr int kMostSlotBytes = 23040;

// A run that grows, and what no instruction of it has yet.
struct Growing {
  Run instructions{};
  std::optional<RouterCall> router{};
  std::optional<TokenCall> token{};
};

// The instruction before which a router chooses.
const Instruction* instruction_of(const Run& run, const RouterCall& router) {
  const auto found = std::find_if(run.begin(), run.end(), [&](const Instruction& each) {
    return each.router && each.router->chosen.id() == router.chosen.id();
  });
  return found == run.end() ? nullptr : &*found;
}

template <typename Of>
int count(const Run& run, const Of& of) {
  return static_cast<int>(std::count_if(run.begin(), run.end(), of));
}

bool experts_fit(const GemvCall& call, const Growing& before) {
  const OneGemv& gemv = call.parts[0];
  if (!before.router || before.router->chosen.id() != gemv.chosen->id()) {
    return false;
  }
  if (!gemv.each_its_row()) {
    return is_gated(call.epilogue) && gemv.inner % Params::kPairValues == 0 && gemv.inner <= Params::kMostInner;
  }
  return instruction_of(before.instructions, *before.router) && call.factors && call.factors->id() == before.router->scores.id() &&
         gemv.inner % Params::kTurnMultiple == 0 && divide(gemv).slot_bytes() <= kMostSlotBytes &&
         gemv.count() * Params::padded(gemv.inner) <= Params::kMostInner;
}

// Whether the kernel takes such a call after others.
bool fits(const GemvCall& call, const Growing& before) {
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

// Whether a router can be between the instructions before it and others.
bool fits(const RouterCall& router, const Growing& before) {
  const auto logits = giver(before.instructions, router.logits, before.instructions.size());
  return logits && before.instructions[logits->instruction].gemv.outputs.size() == 1 && router.params.experts % 2 == 0 &&
         router.logits.dtype() == before.instructions[0].gemv.x.dtype() &&
         count(before.instructions, [](const Instruction& each) { return each.router.has_value(); }) < Params::kMostRouters;
}

// Whether a token can be: if an instruction of the run gives its rows.
bool fits(const TokenCall& token, const Growing& before) {
  const mx::array* rows[] = {&token.heads.queries.rows, &token.heads.keys.rows, &token.heads.values};
  const auto first = giver(before.instructions, *rows[0], before.instructions.size());
  return first &&
         std::all_of(
             std::begin(rows), std::end(rows),
             [&](const mx::array* array) {
               const auto of = giver(before.instructions, *array, before.instructions.size());
               return of && of->instruction == first->instruction;
             }) &&
         token.out.shape(0) == 1 && token.out.shape(3) <= PersistentAttention::kWidth && parts_of(token) > 0 &&
         token.out.dtype() == before.instructions[0].gemv.x.dtype() &&
         count(before.instructions, [](const Instruction& each) { return each.token.has_value(); }) < Params::kMostAttentions;
}

// Whether a call reads one of several results of an earlier one: to GEMVs only single ones are handed over.
bool reads_one_of_several(const GemvCall& call, const Run& run) {
  const auto of_several = [&](const mx::array& in) {
    const auto of = giver(run, in, run.size());
    return of && run[of->instruction].gemv.outputs.size() > 1;
  };
  return of_several(call.x) || (call.added && of_several(*call.added));
}

class Runs {
 public:
  // `most`: instructions of a run.
  Runs(const Plan& plan, std::size_t most) : plan_(plan), most_(most) {}

  void add(GemvCall call) {
    call.x = source_of(plan_, call.x);
    if (call.added) {
      call.added = source_of(plan_, *call.added);
    }
    // Read once: neither by another call nor by a norm, which others could read.
    const bool after_token = last_.token && !call.norm && last_.token->out.id() == call.x.id() && reads_of(plan_, call.x) == 1;
    if (last_.instructions.size() == most_ || reads_one_of_several(call, last_.instructions) || (last_.token && !after_token) ||
        (!last_.instructions.empty() && last_.instructions[0].gemv.x.dtype() != call.x.dtype())) {
      end();
    }
    if (!fits(call, last_)) {
      end();
      return;
    }
    Instruction instruction{std::move(call)};
    instruction.token = std::exchange(last_.token, std::nullopt);
    if (instruction.gemv.parts[0].chosen && !instruction_of(last_.instructions, *last_.router)) {
      instruction.router = last_.router;
    }
    last_.instructions.push_back(std::move(instruction));
  }

  // A router or a token, before a later instruction.
  template <typename Call>
  void add(const Call& call, std::optional<Call> Growing::* to) {
    if (fits(call, last_) && !last_.token) {
      last_.*to = call;
    } else {
      end();
    }
  }

  void end() {
    if (last_.instructions.size() > 1) {
      all_.push_back(std::move(last_.instructions));
    }
    last_ = {};
  }

  std::vector<Run> all() && {
    end();
    return std::move(all_);
  }

 private:
  const Plan& plan_;
  const std::size_t most_;
  std::vector<Run> all_{};
  Growing last_{};
};

}  // namespace

Arrays Instruction::inputs() const {
  Arrays inputs = gemv.inputs();
  if (router) {
    inputs.push_back(router->logits);
  }
  if (token) {
    const Arrays of_token = token->inputs();
    inputs.insert(inputs.end(), of_token.begin(), of_token.end());
  }
  return inputs;
}

Arrays Instruction::outputs() const {
  Arrays outputs = gemv.outputs;
  if (router) {
    outputs.insert(outputs.end(), {router->chosen, router->scores});
  }
  if (token) {
    const Arrays of_token = token->outputs();
    outputs.insert(outputs.end(), of_token.begin(), of_token.end());
  }
  return outputs;
}

std::string name_of(const Run& run) {
  std::vector<std::pair<std::string, int>> counts;
  const auto add = [&](const std::string& name) {
    const auto found = std::find_if(counts.begin(), counts.end(), [&](const auto& one) { return one.first == name; });
    ++(found == counts.end() ? counts.emplace_back(name, 0) : *found).second;
  };
  for (const Instruction& each : run) {
    if (each.token) {
      add(each.token->name());
    }
    if (each.router) {
      add("router");
    }
    add(each.gemv.name());
  }
  std::string all;
  for (const auto& [name, count] : counts) {
    all += (all.empty() ? "" : "; ") + std::to_string(count) + " " + name;
  }
  return all;
}

std::optional<Giver> giver(const Run& run, const mx::array& of, std::size_t before) {
  for (std::size_t i = 0; i < before; ++i) {
    const Arrays& outputs = run[i].gemv.outputs;
    const auto found = std::find_if(outputs.begin(), outputs.end(), [&](const mx::array& out) { return out.id() == of.id(); });
    if (found != outputs.end()) {
      return Giver{static_cast<int>(i), static_cast<int>(found - outputs.begin())};
    }
  }
  return std::nullopt;
}

bool is_read(const Run& run, std::size_t instruction) {
  const Arrays& outputs = run[instruction].gemv.outputs;
  return std::any_of(run.begin() + static_cast<std::ptrdiff_t>(instruction) + 1, run.end(), [&](const Instruction& later) {
    const Arrays inputs = later.inputs();
    return std::any_of(inputs.begin(), inputs.end(), [&](const mx::array& in) {
      return std::any_of(outputs.begin(), outputs.end(), [&](const mx::array& out) { return out.id() == in.id(); });
    });
  });
}

bool same_x(const Run& run, std::size_t instruction) {
  const auto id = [](const MaybeArray& array) { return array ? array->id() : 0; };
  if (instruction == 0 || run[instruction].token) {
    return false;
  }
  const GemvCall& own = run[instruction].gemv;
  const GemvCall& before = run[instruction - 1].gemv;
  return !before.factors && own.x.id() == before.x.id() && id(own.norm) == id(before.norm) && own.eps == before.eps;
}

bool with_experts(const Run& run) {
  return count(run, [](const Instruction& each) { return each.router || each.gemv.parts[0].form->bits != 4; }) > 0;
}

int Division::quads() const {
  return Params::kTeamWarps >> split_shift;
}

int Division::slot_bytes() const {
  return Params::slot_bytes_of(Params::kQuadRows * quads(), slot_values);
}

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

int parts_of(const TokenCall& token) {
  const int kv_heads = token.heads.keys.count;
  const int units = kv_heads * ceil_div(token.heads.queries.count / kv_heads, TokenTraits::kMostRows);
  return std::min(multiprocessors() / units, PersistentAttention::kMostParts);
}

std::vector<Run> runs_of(const Plan& plan, const PersistentCalls& calls, std::size_t most) {
  Runs runs(plan, most);
  for (const Item* item : plan.order()) {
    if (const auto gemv = calls.gemvs.find(item); gemv != calls.gemvs.end()) {
      runs.add(gemv->second);
    } else if (const auto router = calls.routers.find(item); router != calls.routers.end()) {
      runs.add(router->second, &Growing::router);
    } else if (const auto token = calls.tokens.find(item); token != calls.tokens.end()) {
      runs.add(token->second, &Growing::token);
    } else if (!is_view(*item) && item->name != kStepInput) {
      runs.end();
    }
  }
  return std::move(runs).all();
}

}  // namespace mlx_cuda
