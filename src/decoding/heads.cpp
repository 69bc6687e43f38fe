#include "decoding/heads.h"

#include "decoding/append.h"
#include "decoding/heads_params.h"
#include "decoding/views.h"
#include "runtime/device_code.h"
#include "runtime/early.h"
#include "runtime/memory.h"
#include "runtime/node.h"

#include <mlx/fast_primitives.h>

#include <algorithm>
#include <cmath>
#include <string_view>
#include <tuple>
#include <utility>

namespace mlx_cuda {

namespace {

// Heads as they come out of a projection [batch, heads, dim], and what is done to each.
struct Heads {
  mx::array rows;
  mx::array out;
  int count;
  std::optional<mx::array> norm{};
  float eps = 0;
};

// The same rotation of queries and keys.
struct Rotation {
  int dims;
  bool traditional;
  float base;
  float scale;
  mx::array offset;
  std::optional<mx::array> freqs{};

  bool same(const Rotation& other) const {
    return std::tie(dims, traditional, base, scale) == std::tie(other.dims, other.traditional, other.base, other.scale) &&
           offset.id() == other.offset.id() && (freqs ? freqs->id() : 0) == (other.freqs ? other.freqs->id() : 0);
  }
};

bool is_token(const mx::array& heads) {
  return heads.ndim() == 4 && heads.shape(2) == 1;
}

std::optional<std::pair<Heads, Rotation>> rotated(const Plan& plan, const mx::array& given) {
  const mx::array out = source_of(plan, given);
  const Item* rope = given_by(plan, out, "RoPE");
  if (!rope || !is_token(out)) {
    return std::nullopt;
  }
  const auto [fallback, dims, traditional, base, scale, forward] = static_cast<const mx::fast::RoPE&>(out.primitive()).state();
  const auto& inputs = rope->inputs;
  Rotation rotation{dims, traditional, base, scale, inputs[1]};
  if (inputs.size() > 2) {
    rotation.freqs = inputs[2];
  }
  const bool for_each = inputs[1].ndim() == 1 && inputs[1].shape(0) == out.shape(0);
  const bool known = forward && dims % 2 == 0 && (inputs[1].size() == 1 || for_each) && inputs[1].dtype() == mx::int32 &&
                     (!rotation.freqs || (rotation.freqs->dtype() == mx::float32 && rotation.freqs->flags().row_contiguous));
  Heads heads{source_of(plan, inputs[0]), out, out.shape(1)};
  if (const Item* norm = given_by(plan, heads.rows, "RMSNorm")) {
    const mx::array& weight = norm->inputs[1];
    if (weight.ndim() != 1 || weight.shape(0) != out.shape(3) || weight.dtype() != out.dtype() || plan.giver(weight) ||
        heads.rows.shape(-1) != out.shape(3)) {
      return std::nullopt;
    }
    heads.eps = static_cast<const mx::fast::RMSNorm&>(heads.rows.primitive()).state().second;
    heads.norm = weight;
    heads.rows = source_of(plan, norm->inputs[0]);
  }
  return known ? std::optional(std::pair(heads, rotation)) : std::nullopt;
}

struct HeadsCall {
  Heads queries;
  Heads keys;
  mx::array values;
  Rotation rotation;
  mx::array caches[2];
  mx::array place;
  std::vector<mx::array> outputs;  // queries and the caches
};

void launch(const HeadsCall& call, const mx::Stream& stream) {
  auto& encoder = mx::cu::get_command_encoder(stream);
  const mx::array rows[3] = {
      contiguous(call.queries.rows, encoder, stream), contiguous(call.keys.rows, encoder, stream),
      contiguous(call.values, encoder, stream)};
  std::vector<mx::array> outputs = call.outputs;
  allocate(outputs[0], stream);
  HeadsParams params{};
  KernelNode node(encoder);
  for (int i = 0; i < 3; ++i) {
    params.rows[i] = node.reads(rows[i]);
  }
  const Heads* normed[2] = {&call.queries, &call.keys};
  for (int i = 0; i < 2; ++i) {
    params.norms[i] = node.reads(normed[i]->norm);
    params.eps[i] = normed[i]->eps;
    params.heads[i] = normed[i]->count;
    outputs[1 + i].copy_shared_buffer(call.caches[i]);
    node.reads(call.caches[i]);
    params.caches[i] = node.writes(outputs[1 + i]);
  }
  params.queries = node.writes(outputs[0]);
  params.place = node.reads<int>(call.place);
  params.offset = node.reads<int>(call.rotation.offset);
  params.offset_distance = call.rotation.offset.size() > 1 ? static_cast<int>(call.rotation.offset.strides(0)) : 0;
  params.freqs = node.reads<float>(call.rotation.freqs);
  params.log2_base = call.rotation.freqs ? 0.0f : std::log2(call.rotation.base);
  params.scale = call.rotation.scale;
  params.capacity = call.caches[0].shape(2);
  params.batch = outputs[0].shape(0);
  params.dim = outputs[0].shape(3);
  params.rotated = call.rotation.dims;
  params.neighbours = call.rotation.traditional;
  static KernelModule kernels("heads");
  CUfunction kernel = kernels.function("heads_" + type_name(outputs[0].dtype()));
  begins_early(kernel);
  const int all = params.batch * (params.heads[0] + 2 * params.heads[1]);
  node.launch(kernel, dim3(ceil_div(all, HeadsParams::kWarps)), 32 * HeadsParams::kWarps, 0, params);
}

// The attention that reads these keys; the name is that of decode/primitive.cpp.
const Item* attention_of(const Plan& plan, const mx::array& keys) {
  for (const Item* reader : plan.readers(keys)) {
    if (reader->name == "DecodeAttention" && reader->inputs[1].id() == keys.id()) {
      return reader;
    }
  }
  return nullptr;
}

}  // namespace

std::optional<Item> heads_item(const Plan& plan, const Item& append) {
  const auto keys = rotated(plan, append.inputs[0]);
  const Item* attention = attention_of(plan, append.outputs[0]);
  const auto queries = attention ? rotated(plan, attention->inputs[0]) : std::nullopt;
  const mx::array values = source_of(plan, append.inputs[1]);
  if (!keys || !queries || !queries->second.same(keys->second) || !is_token(append.inputs[1])) {
    return std::nullopt;
  }
  const mx::array& out = queries->first.out;
  const auto alike = [&](const mx::array& in) { return in.dtype() == out.dtype() && in.shape(-1) == out.shape(3); };
  const auto& caches = append.inputs;
  if (!alike(keys->first.out) || !alike(append.inputs[1]) || !alike(caches[2]) || !alike(caches[3]) ||
      out.shape(3) > HeadsParams::kMostDim || values.dtype() != out.dtype() || keys->first.out.id() == out.id()) {
    return std::nullopt;
  }
  HeadsCall call{queries->first,
                 keys->first,
                 values,
                 keys->second,
                 {caches[2], caches[3]},
                 caches[4],
                 {out, append.outputs[0], append.outputs[1]}};
  std::vector<mx::array> inputs{call.queries.rows, call.keys.rows, values, call.rotation.offset, caches[2], caches[3]};
  const std::string name = call.keys.norm ? "head norms + rope + append" : "rope + append";
  return Item{name, inputs, call.outputs, [call](const mx::Stream& stream) { launch(call, stream); }};
}

}  // namespace mlx_cuda
