#include "decoding/fusion.h"

#include "decoding/append.h"
#include "decoding/heads.h"
#include "decoding/products.h"
#include "decoding/token.h"
#include "decoding/views.h"

#include <mlx/fast_primitives.h>
#include <mlx/ops.h>
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
      } else if (auto product = item.name == "Matmul" || item.name == "QuantizedSkinny" ? row_product(item) : std::nullopt) {
        const mx::array x = source_of(plan_, product->x);
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
      return other.inner == first.inner && other.out.dtype() == weight.dtype();
    });
    if (!alike || weight.ndim() != 1 || weight.shape(0) != first.inner || norm->inputs[0].shape(-1) != first.inner ||
        plan_.giver(weight) || !weight.flags().row_contiguous) {
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
      if (taken[i] || gated(siblings, i, taken) || added(siblings, siblings.products[i])) {
        continue;
      }
      rest.push_back(siblings.products[i]);
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
    return {siblings.x, siblings.norm, siblings.eps, {}, RowEpilogue::none, std::nullopt, {}};
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

  // One of them and the addition that reads it and is all that does.
  bool added(const Siblings& siblings, const RowProductOf& product) {
    const Item* add = reader_of(plan_, product.out);
    if (!add || add->name != "Add" || add->outputs[0].dtype() != product.out.dtype()) {
      return false;
    }
    const bool first = source_of(plan_, add->inputs[0]).id() == product.out.id();
    const mx::array& other = add->inputs[first ? 1 : 0];
    if (other.dtype() != product.out.dtype() || other.shape() != add->outputs[0].shape() || other.size() != product.out.size()) {
      return false;
    }
    RowProducts call = calls(siblings);
    call.parts = {product};
    call.epilogue = RowEpilogue::add;
    call.added = other;
    call.outputs = add->outputs;
    plan_.replace(call.item());
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
