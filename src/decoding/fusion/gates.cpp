#include "decoding/fusion/gates.h"

#include "decoding/graph/views.h"

#include <mlx/ops.h>
#include <mlx/primitives.h>
#include <mlx/transforms.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace mlx_cuda {

namespace {

// Large ones too, because some models clamp.
constexpr int kCount = 12;
constexpr float kLarge = 60;
const std::vector<float> kValues[2] = {
    {0.5f, -1, 2, 3, -0.25f, 1, -3, 0, 60, -60, 300, -2}, {1, 2, -0.5f, 0.25f, 4, -2, 1.5f, 3, -2, 0.5f, 1, 300}};

bool is_pointwise(const Item& item) {
  return item.outputs.size() == 1 && (item.name == "Multiply" || std::string_view(item.name).starts_with("Compiled"));
}

// The result of a plan for two arrays, one value of each per value of the result.
class Function {
 public:
  // Whether that is all that `out` is made of.
  Function(const Plan& plan, const mx::array& out) : plan_(plan), out_(out), is_one_(read(out) && leaves_.size() == 2) {
    for (const auto& [id, of] : read_) {
      is_one_ = is_one_ && of.count == reads_of(plan, of.array);
    }
  }
  bool is_one() const {
    return is_one_;
  }
  const Arrays& leaves() const {
    return leaves_;
  }
  // The same for the same function.
  const std::string& text() const {
    return text_;
  }

  std::vector<float> tried() const {
    const mx::array result = mx::astype(call(out_), mx::float32, out_.primitive().stream());
    mx::array given = result;
    given.eval();
    return {given.data<float>(), given.data<float>() + kCount};
  }

 private:
  struct Read {
    mx::array array;
    std::size_t count = 0;
  };

  // An array by the primitives that give it; others are leaves, or constants.
  bool read(const mx::array& of) {
    const mx::array source = source_of(plan_, of);
    const Item* item = plan_.giver(source);
    if (!item) {
      text_ += " #" + std::to_string(source.id());
      return source.size() == 1 && source.ndim() <= 3;
    }
    if (source.id() != out_.id()) {
      ++read_.try_emplace(source.id(), Read{source}).first->second.count;
    }
    if (!is_pointwise(*item)) {
      const auto same = [&](const mx::array& leaf) { return leaf.id() == source.id(); };
      const auto leaf = std::find_if(leaves_.begin(), leaves_.end(), same);
      text_ += " " + std::to_string(leaf - leaves_.begin());
      if (leaf == leaves_.end()) {
        leaves_.push_back(source);
      }
      return leaves_.size() <= 2;
    }
    const auto [seen, first] = seen_.try_emplace(source.id(), seen_.size());
    if (!first) {  // a repeated node is not visited again
      text_ += " =" + std::to_string(seen->second);
      return true;
    }
    const bool compiled = item->name != "Multiply";
    text_ += " (" + item->name + (compiled ? std::to_string(source.primitive_id()) : "");
    const bool known = source.size() == out_.size() &&
                       std::all_of(item->inputs.begin(), item->inputs.end(), [&](const mx::array& in) { return read(in); });
    text_ += ")";
    return known;
  }

  mx::array call(const mx::array& of) const {
    const mx::array source = source_of(plan_, of);
    if (!plan_.giver(source)) {
      return source;
    }
    const mx::Stream& stream = out_.primitive().stream();
    for (std::size_t i = 0; i < leaves_.size(); ++i) {
      if (leaves_[i].id() == source.id()) {
        return mx::astype(mx::array(kValues[i].begin(), {1, 1, kCount}), source.dtype(), stream);
      }
    }
    Arrays inputs;
    for (const mx::array& in : source.inputs()) {
      inputs.push_back(call(in));
    }
    return mx::array({1, 1, kCount}, source.dtype(), source.primitive_ptr(), inputs);
  }

  const Plan& plan_;
  const mx::array out_;
  Arrays leaves_{};
  std::unordered_map<std::uintptr_t, Read> read_{};
  std::unordered_map<std::uintptr_t, std::size_t> seen_{};  // how many were there before
  std::string text_{};
  bool is_one_;
};

float activated(GemvEpilogue activation, float x) {
  switch (activation) {
    case GemvEpilogue::geglu:
      return x * 0.5f * (1 + std::erf(x * 0.7071067812f));
    case GemvEpilogue::geglu_tanh:
      return x * 0.5f * (1 + std::tanh(0.7978845608f * (x + 0.044715f * x * x * x)));
    default:
      return x / (1 + std::exp(-x));
  }
}

// Each step of a function may have been rounded to bfloat16 or float16. Activations return a large gate unchanged, so its tolerance
// is 0 and no factor near 1 is missed.
float tolerance_of(float gate, float expected, float up = 0) {
  return gate >= kLarge ? 0 : 0.02f * std::abs(expected) + 0.01f * std::abs(up) + 1e-3f;
}

// Which activation of which leaf, times the other one. Both ways to compute gelu are nearer to each other than rounding, so its
// name decides.
std::optional<std::pair<GemvEpilogue, bool>> recognised(const Function& function) {
  const std::vector<float> given = function.tried();
  const bool has_erf = function.text().find("Erf") != std::string::npos;
  for (const GemvEpilogue activation : {GemvEpilogue::swiglu, has_erf ? GemvEpilogue::geglu : GemvEpilogue::geglu_tanh}) {
    for (int gate = 0; gate < 2; ++gate) {
      bool same = true;
      for (int i = 0; i < kCount; ++i) {
        const float up = kValues[1 - gate][i];
        const float expected = activated(activation, kValues[gate][i]) * up;
        const float tolerance = tolerance_of(kValues[gate][i], expected, up);
        same = same && std::abs(given[i] - expected) <= tolerance;
      }
      if (same) {
        return std::pair(activation, gate == 1);
      }
    }
  }
  return std::nullopt;
}

}  // namespace

std::optional<Gate> Gates::read_by(const mx::array& up, const std::function<bool(const mx::array&, const mx::array&)>& known) {
  const Item* last = reader_of(plan_, up);
  if (!last || !is_pointwise(*last)) {
    return std::nullopt;
  }
  const mx::array& out = last->outputs[0];
  const Function function(plan_, out);
  if (!function.is_one() || out.dtype() != up.dtype() || out.size() != up.size()) {
    return std::nullopt;
  }
  const mx::array& one = function.leaves()[0];
  const mx::array& other = function.leaves()[1];
  if (!known(one, other)) {
    return std::nullopt;
  }
  const auto [found, added] = tried_.try_emplace(function.text(), std::nullopt);
  if (added) {
    found->second = recognised(function);
  }
  if (!found->second) {
    return std::nullopt;
  }
  const auto [activation, second] = *found->second;
  return Gate{activation, second ? other : one, second ? one : other, out};
}

bool Gates::is_silu(const Item& item) {
  if (item.inputs.size() != 1 || item.outputs.size() != 1 || !std::string_view(item.name).starts_with("Compiled")) {
    return false;
  }
  const mx::array& x = item.inputs[0];
  const mx::array& out = item.outputs[0];
  if (out.dtype() != x.dtype() || out.shape() != x.shape()) {
    return false;
  }
  const auto [found, added] = silu_.try_emplace(item.name + std::to_string(out.primitive_id()), false);
  if (added) {
    const mx::Stream& stream = out.primitive().stream();
    const mx::array values = mx::astype(mx::array(kValues[0].begin(), {1, 1, kCount}), x.dtype(), stream);
    mx::array tried = mx::astype(mx::array({1, 1, kCount}, x.dtype(), out.primitive_ptr(), {values}), mx::float32, stream);
    tried.eval();
    const float* given = tried.data<float>();
    found->second = std::equal(kValues[0].begin(), kValues[0].end(), given, [](float value, float result) {
      const float expected = activated(GemvEpilogue::swiglu, value);
      return std::abs(result - expected) <= tolerance_of(value, expected);
    });
  }
  return found->second;
}

}  // namespace mlx_cuda
