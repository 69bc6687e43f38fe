// Calls of attention that are answered before Python looks at them.
//
// `remember_…` keeps which engine Python chose for a call, and `…_again` computes an equal one with it: the same arguments, but for
// values, strides and, within the bounds that Python names, the number of keys.
#include "attention/cudnn/forward.h"
#include "attention/decode/primitive.h"
#include "attention/flash/primitive.h"
#include "bindings/attention.h"
#include "bindings/attention_call.h"

#include <mlx/fast.h>
#include <mlx/ops.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>

#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace mlx_cuda {

using namespace nb::literals;

namespace {

enum class Engine { decode, cudnn, flash, upstream };

// Who computes calls with so many keys.
struct Recipe {
  Engine engine;
  int fewest_keys;
  int most_keys;
};

constexpr std::size_t kMostRecipes = 8;  // of calls that differ in the number of keys alone

thread_local LruCache<std::vector<Recipe>> attention_calls{4096};

std::optional<Engine> engine_from(const std::string& name) {
  for (const auto& [known, engine] :
       {std::pair("decode", Engine::decode), {"cudnn", Engine::cudnn}, {"flash", Engine::flash}, {"upstream", Engine::upstream}}) {
    if (name == known) {
      return engine;
    }
  }
  return std::nullopt;
}

bool some(const mx::array& in) {
  return in.ndim() == 4 && in.size() > 0;
}

std::vector<mx::array> compute(
    Engine engine,
    const Call& call,
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    bool deterministic,
    const mx::Stream& on) {
  const AttentionOptions& options = call.options;
  const bool causal = options.window_right == 0;
  switch (engine) {
    case Engine::cudnn:
      return attention(q, k, v, call.extras.sinks, {options.scale, causal, options.window_left, deterministic}, call.lse, on);
    case Engine::upstream:
      return {mx::fast::scaled_dot_product_attention(q, k, v, options.scale, causal ? "causal" : "", {}, {}, false, on)};
    default:
      break;
  }
  AttentionExtras extras = call.extras;
  if (extras.mask) {
    extras.mask = mx::broadcast_to(*extras.mask, {q.shape(0), q.shape(1), q.shape(2), k.shape(2)}, on);
  }
  return engine == Engine::decode ? decode_attention(q, k, v, extras, options, call.lse, on)
                                  : flash_attention(q, k, v, extras, options, call.lse, on);
}

// The arguments of `attention` in python/mlx_cuda/_attention/attention.py.
struct AttentionArguments {
  const mx::array& q;
  const mx::array& k;
  const mx::array& v;
  const MaybeNumber& scale;
  const Mask& mask;
  nb::handle window_size;
  const MaybeNumber& softcap;
  const MaybeArray& sinks;
  const MaybeArray& lengths;
  const MaybeArray& left_padding;
  bool return_lse;
  bool deterministic;
  bool force_fused;

  std::optional<Call> call() const {
    if (!some(q) || !some(k) || !some(v) || !same_dtype(q, k, v) || !same_sizes(q, k, {0, 3}) || !same_sizes(k, v, {0, 1, 2})) {
      return std::nullopt;
    }
    const mx::Shape scores{q.shape(0), q.shape(1), q.shape(2), k.shape(2)};
    Call call{.extras = {std::nullopt, left_padding, lengths, sinks}, .lse = return_lse};
    const bool vectors = is_vector(sinks, q.shape(1), q.dtype()) && is_vector(lengths, q.shape(0), mx::int32) &&
                         is_vector(left_padding, q.shape(0), mx::int32);
    if (!vectors || !read_numbers(call, scale, softcap, q.shape(3)) || !read_window(call, window_size, k.shape(2)) ||
        !read_mask(call, mask, scores, q.dtype())) {
      return std::nullopt;
    }
    return call;
  }

  Key key(const Call& call, const mx::Stream& stream) const {
    Key key = key_of(call, q.dtype(), {q.shape(0), q.shape(1), q.shape(2), q.shape(3), k.shape(1), v.shape(3)}, stream);
    key.add(deterministic);
    key.add(force_fused);
    return key;
  }
};

void remember_attention(
    const std::string& engine,
    int fewest_keys,
    int most_keys,
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    const MaybeNumber& scale,
    const Mask& mask,
    nb::handle window_size,
    const MaybeNumber& softcap,
    const MaybeArray& sinks,
    const MaybeArray& lengths,
    const MaybeArray& left_padding,
    bool return_lse,
    bool deterministic,
    bool force_fused,
    const mx::Stream& stream) {
  const AttentionArguments in{
      q, k, v, scale, mask, window_size, softcap, sinks, lengths, left_padding, return_lse, deterministic, force_fused};
  const auto chosen = engine_from(engine);
  const auto call = in.call();
  if (!chosen || !call) {
    return;
  }
  // Python calls MLX's own function in other ways for masks, for queries before the first key and where MLX may call cuDNN.
  const bool blind = call->options.window_right == 0 && q.shape(2) > k.shape(2);
  const bool direct = q.dtype() == mx::float32 || q.shape(3) % 8 != 0;
  if (*chosen == Engine::upstream && (call->extras.mask || force_fused || blind || !direct)) {
    return;
  }
  auto& recipes = attention_calls.get(in.key(*call, stream), [] { return std::vector<Recipe>(); });
  if (recipes.size() == kMostRecipes) {
    recipes.pop_back();
  }
  recipes.insert(recipes.begin(), {*chosen, fewest_keys, most_keys});
}

nb::object attention_again(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    const MaybeNumber& scale,
    const Mask& mask,
    nb::handle window_size,
    const MaybeNumber& softcap,
    const MaybeArray& sinks,
    const MaybeArray& lengths,
    const MaybeArray& left_padding,
    bool return_lse,
    bool deterministic,
    bool force_fused,
    const StreamOrDevice& stream) {
  const AttentionArguments in{
      q, k, v, scale, mask, window_size, softcap, sinks, lengths, left_padding, return_lse, deterministic, force_fused};
  const auto call = in.call();
  if (!call) {
    return nb::none();
  }
  const mx::Stream on = stream_of(stream);
  if (const auto* recipes = attention_calls.find(in.key(*call, on))) {
    for (const auto& [engine, fewest, most] : *recipes) {
      if (fewest <= k.shape(2) && k.shape(2) <= most) {
        return returned(compute(engine, *call, q, k, v, deterministic, on), return_lse);
      }
    }
  }
  return nb::none();
}

}  // namespace

void bind_remembered_attention(nb::module_& m) {
  m.def(
      "remember_attention", &remember_attention, "engine"_a, "fewest_keys"_a, "most_keys"_a, "q"_a, "k"_a, "v"_a, "scale"_a.none(),
      "mask"_a.none(), "window_size"_a.none(), "softcap"_a.none(), "sinks"_a.none(), "lengths"_a.none(), "left_padding"_a.none(),
      "return_lse"_a, "deterministic"_a, "force_fused"_a, "stream"_a);
  m.def(
      "attention_again", &attention_again, "q"_a, "k"_a, "v"_a, "scale"_a.none(), "mask"_a.none(), "window_size"_a.none(),
      "softcap"_a.none(), "sinks"_a.none(), "lengths"_a.none(), "left_padding"_a.none(), "return_lse"_a, "deterministic"_a,
      "force_fused"_a, "stream"_a.none());
}

}  // namespace mlx_cuda
