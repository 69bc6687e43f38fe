#include "decoding/fusion/fusion.h"

#include "decoding/append/append.h"
#include "decoding/fusion/gates.h"
#include "decoding/fusion/short_conv.h"
#include "decoding/fusion/sums.h"
#include "decoding/graph/views.h"
#include "decoding/heads/heads.h"
#include "decoding/persistent/persistent.h"
#include "decoding/router/router.h"
#include "decoding/row_norm/row_norm.h"
#include "decoding/token/token.h"
#include "matmul/gemv/gemv.h"
#include "runtime/memory.h"

#include <mlx/fast_primitives.h>
#include <mlx/primitives.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

namespace mlx_cuda {

namespace {

// Of x, up to which GEMVs of packed weights normalize it in each block: with 64 KB, separate kernels take less time (H200).
constexpr std::size_t kMostNormBytes = 48 * 1024;

// The GEMVs that read the same array, and the norm before them.
struct Siblings {
  std::vector<OneGemv> gemvs;
  mx::array x;
  MaybeArray norm{};
  float eps = 0;
};

class Fusion {
 public:
  Fusion(Plan& plan, const mx::Stream& stream) : plan_(plan), stream_(stream) {}

  void run() {
    std::vector<std::uintptr_t> order;
    std::unordered_map<std::uintptr_t, Siblings> all;
    std::vector<const Item*> appends;
    std::vector<const Item*> norms;
    std::vector<const Item*> convolutions;
    std::vector<const Item*> sums;
    for (const Item& item : plan_.items()) {
      if (item.name == kCacheAppend || item.name == kQuantizedCacheAppend) {
        appends.push_back(&item);
      } else if (item.name == "RMSNorm") {
        norms.push_back(&item);
      } else if (item.name == "Convolution") {
        convolutions.push_back(&item);
      } else if (item.name == kAllSum) {
        sums.push_back(&item);
      } else if (auto gemv = gemv_of(item.outputs[0])) {
        const mx::array x = source_of(plan_, gemv->x);
        if (gemv->chosen) {
          gemv->chosen = source_of(plan_, *gemv->chosen);
        }
        const auto [at, first] = all.try_emplace(x.id(), Siblings{{}, x});
        if (first) {
          order.push_back(x.id());
        }
        at->second.gemvs.push_back(std::move(*gemv));
      }
    }
    for (const std::uintptr_t id : order) {
      Siblings& siblings = all.at(id);
      if (take_norm(siblings)) {
        fuse(siblings);
      }
    }
    for (const Item* norm : norms) {
      if (auto result = row_norm_item(plan_, *norm)) {
        plan_.replace(std::move(*result));
      }
    }
    for (const Item* convolution : convolutions) {
      if (auto result = short_conv_item(plan_, gates_, *convolution)) {
        plan_.replace(std::move(*result));
      }
    }
    for (const Item* sum : sums) {
      plan_.replace(all_sum_item(plan_, *sum));
    }
    for (const Item* append : appends) {
      if (const auto call = heads_call(plan_, *append)) {
        const auto token = token_call(plan_, *call);
        plan_.replace(token ? token_item(*token) : heads_item(*call));
        if (token) {
          calls_.tokens.emplace(plan_.giver(token->out), *token);
        }
      }
    }
    fuse_runs(plan_, calls_, stream_);
  }

 private:
  // The norm that gives their x, if they are all that read it. False where it makes them too slow to be fused.
  bool take_norm(Siblings& siblings) const {
    const Item* norm = given_by(plan_, siblings.x, "RMSNorm");
    if (!norm || reads_of(plan_, siblings.x) != siblings.gemvs.size()) {
      return true;
    }
    const mx::array& weight = norm->inputs[1];
    const OneGemv& first = siblings.gemvs[0];
    const bool alike = std::all_of(siblings.gemvs.begin(), siblings.gemvs.end(), [&](const OneGemv& other) {
      return other.inner == first.inner && other.out.dtype() == weight.dtype() && !other.each_its_row();
    });
    if (!alike || weight.ndim() != 1 || weight.shape(0) != first.inner || norm->inputs[0].shape(-1) != first.inner ||
        plan_.giver(weight) || !weight.flags().row_contiguous || !on_16_bytes(weight)) {
      return true;
    }
    const bool packed =
        std::any_of(siblings.gemvs.begin(), siblings.gemvs.end(), [](const OneGemv& each) { return each.form.has_value(); });
    if (packed && norm->inputs[0].nbytes() > kMostNormBytes) {
      return false;
    }
    siblings.eps = static_cast<const mx::fast::RMSNorm&>(siblings.x.primitive()).state().second;
    siblings.norm = weight;
    siblings.x = norm->inputs[0];
    return true;
  }

  void fuse(const Siblings& siblings) {
    std::vector<OneGemv> rest;
    std::vector<bool> taken(siblings.gemvs.size());
    for (std::size_t i = 0; i < siblings.gemvs.size(); ++i) {
      if (!taken[i]) {
        gated(siblings, i, taken);
      }
    }
    for (std::size_t i = 0; i < siblings.gemvs.size(); ++i) {
      const OneGemv& gemv = siblings.gemvs[i];
      if (!taken[i] && !summed(siblings, gemv) && !added(siblings, gemv) && !gemv.each_its_row()) {
        rest.push_back(gemv);
      }
    }
    while (!rest.empty()) {
      GemvCall call = calls(siblings);
      for (auto gemv = rest.begin(); gemv != rest.end() && call.parts.size() < GemvParams::kMostParts;) {
        if (call.parts.empty() || call.parts[0].same_kind(*gemv)) {
          call.outputs.push_back(gemv->out);
          call.parts.push_back(std::move(*gemv));
          gemv = rest.erase(gemv);
        } else {
          ++gemv;
        }
      }
      replace(call);
    }
  }

  static GemvCall calls(const Siblings& siblings) {
    return {siblings.x, siblings.norm, siblings.eps, {}, GemvEpilogue::none, {}, {}, {}};
  }

  void replace(const GemvCall& call) {
    plan_.replace({call.name(), call.inputs(), call.outputs, [call](const mx::Stream& stream) { launch(call, stream); }});
    calls_.gemvs.emplace(plan_.giver(call.outputs[0]), call);
  }

  // Two of them and the gate that is all that reads them.
  void gated(const Siblings& siblings, std::size_t index, std::vector<bool>& taken) {
    const auto& gemvs = siblings.gemvs;
    const auto place_of = [&](const mx::array& out) {
      const auto same = [&](const OneGemv& gemv) { return gemv.out.id() == out.id(); };
      return static_cast<std::size_t>(std::find_if(gemvs.begin(), gemvs.end(), same) - gemvs.begin());
    };
    const auto gate = gates_.read_by(gemvs[index].out, [&](const mx::array& one, const mx::array& other) {
      const std::size_t places[2] = {place_of(one), place_of(other)};
      return std::max(places[0], places[1]) < gemvs.size() && gemvs[places[0]].same_kind(gemvs[places[1]]) &&
             gemvs[places[0]].columns == gemvs[places[1]].columns && !gemvs[places[0]].each_its_row();
    });
    if (!gate) {
      return;
    }
    GemvCall call = calls(siblings);
    for (const mx::array& out : {gate->gate, gate->up}) {
      taken[place_of(out)] = true;
      call.parts.push_back(gemvs[place_of(out)]);
    }
    call.epilogue = gate->activation;
    call.outputs = {gate->out};
    replace(call);
  }

  // MoE GEMVs of one row per expert, the scores that they are multiplied by, and their sum.
  bool summed(const Siblings& siblings, const OneGemv& gemv) {
    const Item* multiply = gemv.each_its_row() ? reader_of(plan_, gemv.out) : nullptr;
    const Item* sum = multiply && multiply->name == "Multiply" ? reader_of(plan_, multiply->outputs[0]) : nullptr;
    if (!sum || sum->name != "Sum") {
      return false;
    }
    const mx::array& scored = multiply->outputs[0];
    const auto [kind, axes] = static_cast<const mx::Reduce&>(sum->outputs[0].primitive()).state();
    const bool first = source_of(plan_, multiply->inputs[0]).id() == gemv.out.id();
    const Item* broadcast = given_by(plan_, multiply->inputs[first ? 1 : 0], "Broadcast");
    const int last = static_cast<int>(scored.ndim()) - 1;
    if (!broadcast || last < 1 || axes != std::vector<int>{last - 1} || scored.shape(last) != gemv.columns ||
        scored.shape(last - 1) != gemv.count() || scored.size() != gemv.out.size() || sum->inputs[0].shape() != scored.shape()) {
      return false;
    }
    const mx::array& column = broadcast->inputs[0];
    const mx::array scores = source_of(plan_, column);
    if (column.shape(-1) != 1 || column.size() != static_cast<std::size_t>(gemv.count()) || scores.dtype() != gemv.out.dtype() ||
        sum->outputs[0].dtype() != gemv.out.dtype()) {
      return false;
    }
    GemvCall call = calls(siblings);
    call.parts = {gemv};
    call.factors = scores;
    if (!add_to(call, sum->outputs[0])) {
      call.outputs = sum->outputs;
    }
    replace(call);
    if (const auto router = router_call(plan_, *gemv.chosen, scores)) {
      plan_.replace(router_item(*router));
      calls_.routers.emplace(plan_.giver(router->chosen), *router);
    }
    return true;
  }

  // One of them and the addition that reads it and is all that does.
  bool added(const Siblings& siblings, const OneGemv& gemv) {
    GemvCall call = calls(siblings);
    call.parts = {gemv};
    if (gemv.chosen || !add_to(call, gemv.out)) {
      return false;
    }
    replace(call);
    return true;
  }

  // Has a call end with the addition that reads its result, if that is all that does.
  bool add_to(GemvCall& call, const mx::array& result) const {
    const Item* add = reader_of(plan_, result);
    const auto other = add ? added_to(plan_, *add, result) : std::nullopt;
    if (!other) {
      return false;
    }
    call.epilogue = GemvEpilogue::add;
    call.added = *other;
    call.outputs = add->outputs;
    return true;
  }

  Plan& plan_;
  const mx::Stream stream_;
  Gates gates_{plan_};
  PersistentCalls calls_{};
};

}  // namespace

void fuse(Plan& plan, const mx::Stream& stream) {
  Fusion(plan, stream).run();
}

}  // namespace mlx_cuda
