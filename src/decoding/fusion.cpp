#include "decoding/fusion.h"

#include "decoding/append.h"
#include "decoding/heads.h"
#include "decoding/products.h"
#include "decoding/router.h"
#include "decoding/token.h"
#include "decoding/views.h"
#include "runtime/memory.h"

#include <mlx/fast_primitives.h>
#include <mlx/ops.h>
#include <mlx/primitives.h>
#include <mlx/transforms.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace mlx_cuda {

namespace {

// Which input of a compiled function is the gate of silu(gate) * up, found out by calling it; none where it is another function.
class Gates {
 public:
  std::optional<int> gate_of(const Item& item) {
    if (!std::string_view(item.name).starts_with("CompiledSigmoid") || item.inputs.size() != 2 || item.outputs.size() != 1) {
      return std::nullopt;
    }
    const mx::array& out = item.outputs[0];
    const auto [known, added] = known_.try_emplace(out.primitive_id(), std::nullopt);
    if (added) {
      known->second = tried(out);
    }
    return known->second;
  }

 private:
  static std::optional<int> tried(const mx::array& out) {
    constexpr int count = 8;
    const std::vector<float> values[2] = {{0.5f, -1, 2, 3, -0.25f, 1, -3, 0}, {1, 2, -0.5f, 0.25f, 4, -2, 1.5f, 3}};
    std::vector<mx::array> inputs;
    for (const auto& each : values) {
      inputs.push_back(mx::astype(mx::array(each.begin(), {1, 1, count}), out.dtype(), out.primitive().stream()));
    }
    const mx::array result =
        mx::astype(mx::array({1, 1, count}, out.dtype(), out.primitive_ptr(), inputs), mx::float32, out.primitive().stream());
    mx::array given = result;
    given.eval();
    for (int gate = 0; gate < 2; ++gate) {
      bool same = true;
      for (int i = 0; i < count; ++i) {
        const float expected = values[gate][i] / (1 + std::exp(-values[gate][i])) * values[1 - gate][i];
        same = same && std::abs(given.data<float>()[i] - expected) <= 0.02f * std::abs(expected) + 1e-3f;
      }
      if (same) {
        return gate;
      }
    }
    return std::nullopt;
  }

  std::map<std::uintptr_t, std::optional<int>> known_{};
};

// The products that read the same array, and the norm before them.
struct Siblings {
  std::vector<RowProductOf> products;
  mx::array x;
  std::optional<mx::array> norm{};
  float eps = 0;
};

class Fusion {
 public:
  explicit Fusion(Plan& plan) : plan_(plan) {}

  void run() {
    std::vector<std::uintptr_t> order;
    std::unordered_map<std::uintptr_t, Siblings> all;
    std::vector<const Item*> appends;
    for (const Item& item : plan_.items()) {
      if (item.name == kCacheAppend) {
        appends.push_back(&item);
      } else if (auto product = row_product(item)) {
        const mx::array x = source_of(plan_, product->x);
        if (product->chosen) {
          product->chosen = source_of(plan_, *product->chosen);
        }
        const auto [at, first] = all.try_emplace(x.id(), Siblings{{}, x});
        if (first) {
          order.push_back(x.id());
        }
        at->second.products.push_back(std::move(*product));
      }
    }
    for (const std::uintptr_t id : order) {
      Siblings& siblings = all.at(id);
      take_norm(siblings);
      fuse(siblings);
    }
    for (const Item* append : appends) {
      if (const auto call = heads_call(plan_, *append)) {
        auto whole = token_item(plan_, *call);
        plan_.replace(whole ? std::move(*whole) : heads_item(*call));
      }
    }
  }

 private:
  // The norm that gives their x, if they are all that read it.
  void take_norm(Siblings& siblings) const {
    const Item* norm = given_by(plan_, siblings.x, "RMSNorm");
    if (!norm || readers(siblings.x) != siblings.products.size()) {
      return;
    }
    const mx::array& weight = norm->inputs[1];
    const RowProductOf& first = siblings.products[0];
    const bool alike = std::all_of(siblings.products.begin(), siblings.products.end(), [&](const RowProductOf& other) {
      return other.inner == first.inner && other.out.dtype() == weight.dtype() && !other.each_its_row();
    });
    if (!alike || weight.ndim() != 1 || weight.shape(0) != first.inner || norm->inputs[0].shape(-1) != first.inner ||
        plan_.giver(weight) || !weight.flags().row_contiguous || !on_16_bytes(weight)) {
      return;
    }
    siblings.eps = static_cast<const mx::fast::RMSNorm&>(siblings.x.primitive()).state().second;
    siblings.norm = weight;
    siblings.x = norm->inputs[0];
  }

  // How many primitives read an array, whatever its shape.
  std::size_t readers(const mx::array& of) const {
    std::size_t count = of.id() == plan_.result().id();
    for (const Item* reader : plan_.readers(of)) {
      const bool view = source_of(plan_, reader->outputs[0]).id() != reader->outputs[0].id();
      count += view ? readers(reader->outputs[0]) : 1;
    }
    return count;
  }

  void fuse(const Siblings& siblings) {
    std::vector<RowProductOf> rest;
    std::vector<bool> taken(siblings.products.size());
    for (std::size_t i = 0; i < siblings.products.size(); ++i) {
      const RowProductOf& product = siblings.products[i];
      if (!taken[i] && !gated(siblings, i, taken) && !summed(siblings, product) && !added(siblings, product) &&
          !product.each_its_row()) {
        rest.push_back(product);
      }
    }
    while (!rest.empty()) {
      RowProducts call = calls(siblings);
      for (auto product = rest.begin(); product != rest.end() && call.parts.size() < RowProductParams::kMostParts;) {
        if (call.parts.empty() || call.parts[0].same_kind(*product)) {
          call.outputs.push_back(product->out);
          call.parts.push_back(std::move(*product));
          product = rest.erase(product);
        } else {
          ++product;
        }
      }
      plan_.replace(call.item());
    }
  }

  static RowProducts calls(const Siblings& siblings) {
    return {siblings.x, siblings.norm, siblings.eps, {}, RowEpilogue::none, {}, {}, {}};
  }

  // Two of them and the gate that reads both and is all that does.
  bool gated(const Siblings& siblings, std::size_t index, std::vector<bool>& taken) {
    const RowProductOf& one = siblings.products[index];
    const Item* reader = reader_of(plan_, one.out);
    const auto gate = reader ? gates_.gate_of(*reader) : std::nullopt;
    if (!gate) {
      return false;
    }
    const mx::array inputs[2] = {source_of(plan_, reader->inputs[*gate]), source_of(plan_, reader->inputs[1 - *gate])};
    const auto& products = siblings.products;
    std::optional<std::size_t> pair[2];
    for (std::size_t i = 0; i < products.size(); ++i) {
      for (int which = 0; which < 2; ++which) {
        if (products[i].out.id() == inputs[which].id() && reader_of(plan_, products[i].out) == reader) {
          pair[which] = i;
        }
      }
    }
    if (!pair[0] || !pair[1] || pair[0] == pair[1] || !products[*pair[0]].same_kind(products[*pair[1]]) ||
        products[*pair[0]].columns != products[*pair[1]].columns || reader->outputs[0].size() != one.out.size()) {
      return false;
    }
    taken[*pair[0]] = taken[*pair[1]] = true;
    RowProducts call = calls(siblings);
    call.parts = {products[*pair[0]], products[*pair[1]]};
    call.epilogue = RowEpilogue::swiglu;
    call.outputs = reader->outputs;
    plan_.replace(call.item());
    return true;
  }

  // Experts' products of a row each, the scores that they are multiplied by, and their sum.
  bool summed(const Siblings& siblings, const RowProductOf& product) {
    const Item* multiply = product.each_its_row() ? reader_of(plan_, product.out) : nullptr;
    const Item* sum = multiply && multiply->name == "Multiply" ? reader_of(plan_, multiply->outputs[0]) : nullptr;
    if (!sum || sum->name != "Sum") {
      return false;
    }
    const mx::array& scored = multiply->outputs[0];
    const auto [kind, axes] = static_cast<const mx::Reduce&>(sum->outputs[0].primitive()).state();
    const bool first = source_of(plan_, multiply->inputs[0]).id() == product.out.id();
    const Item* broadcast = given_by(plan_, multiply->inputs[first ? 1 : 0], "Broadcast");
    const int last = static_cast<int>(scored.ndim()) - 1;
    if (!broadcast || last < 1 || axes != std::vector<int>{last - 1} || scored.shape(last) != product.columns ||
        scored.shape(last - 1) != product.count() || scored.size() != product.out.size() ||
        sum->inputs[0].shape() != scored.shape()) {
      return false;
    }
    const mx::array& column = broadcast->inputs[0];
    const mx::array scores = source_of(plan_, column);
    if (column.shape(-1) != 1 || column.size() != static_cast<std::size_t>(product.count()) ||
        scores.dtype() != product.out.dtype() || sum->outputs[0].dtype() != product.out.dtype()) {
      return false;
    }
    RowProducts call = calls(siblings);
    call.parts = {product};
    call.factors = scores;
    if (!add_to(call, sum->outputs[0])) {
      call.outputs = sum->outputs;
    }
    plan_.replace(call.item());
    if (auto router = router_item(plan_, *product.chosen, scores)) {
      plan_.replace(std::move(*router));
    }
    return true;
  }

  // One of them and the addition that reads it and is all that does.
  bool added(const Siblings& siblings, const RowProductOf& product) {
    RowProducts call = calls(siblings);
    call.parts = {product};
    if (product.chosen || !add_to(call, product.out)) {
      return false;
    }
    plan_.replace(call.item());
    return true;
  }

  // Has a call end with the addition that reads its result, if that is all that does.
  bool add_to(RowProducts& call, const mx::array& result) const {
    const Item* add = reader_of(plan_, result);
    if (!add || add->name != "Add" || add->outputs[0].dtype() != result.dtype()) {
      return false;
    }
    const bool first = source_of(plan_, add->inputs[0]).id() == result.id();
    const mx::array& other = add->inputs[first ? 1 : 0];
    if (other.dtype() != result.dtype() || other.shape() != add->outputs[0].shape() || other.size() != result.size()) {
      return false;
    }
    call.epilogue = RowEpilogue::add;
    call.added = other;
    call.outputs = add->outputs;
    return true;
  }

  Plan& plan_;
  Gates gates_{};
};

}  // namespace

void fuse(Plan& plan) {
  Fusion(plan).run();
}

}  // namespace mlx_cuda
