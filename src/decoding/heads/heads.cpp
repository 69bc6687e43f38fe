#include "decoding/heads/heads.h"

#include "decoding/graph/views.h"
#include "runtime/device_code.h"
#include "runtime/kernel_table.h"
#include "runtime/memory.h"
#include "runtime/pdl.h"

#include <mlx/fast_primitives.h>

#include <cmath>
#include <string_view>
#include <tuple>

namespace mlx_cuda {

namespace {

constexpr auto kPlain = std::to_array<KernelRow<std::string_view>>({MLX_CUDA_HEADS_KERNELS(MLX_CUDA_KERNEL_ROW, MLX_CUDA_NO_ROW)});
constexpr auto kQuantized =
    std::to_array<KernelRow<std::string_view, int>>({MLX_CUDA_HEADS_KERNELS(MLX_CUDA_NO_ROW, MLX_CUDA_KERNEL_ROW)});

bool same(const Rotation& one, const Rotation& other) {
  const auto id = [](const MaybeArray& freqs) { return freqs ? freqs->id() : 0; };
  return std::tie(one.dims, one.traditional, one.base, one.scale) ==
             std::tie(other.dims, other.traditional, other.base, other.scale) &&
         one.offset.id() == other.offset.id() && id(one.freqs) == id(other.freqs);
}

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
                     (!rotation.freqs || (!plan.giver(*rotation.freqs) && rotation.freqs->dtype() == mx::float32 &&
                                          rotation.freqs->flags().row_contiguous));
  Heads heads{source_of(plan, inputs[0]), out, out.shape(1)};
  if (const Item* norm = given_by(plan, heads.rows, "RMSNorm")) {
    const mx::array& weight = norm->inputs[1];
    if (weight.ndim() != 1 || weight.shape(0) != out.shape(3) || weight.dtype() != out.dtype() || plan.giver(weight) ||
        !weight.flags().row_contiguous || heads.rows.shape(-1) != out.shape(3)) {
      return std::nullopt;
    }
    heads.eps = static_cast<const mx::fast::RMSNorm&>(heads.rows.primitive()).state().second;
    heads.norm = weight;
    heads.rows = source_of(plan, norm->inputs[0]);
  }
  return known ? std::optional(std::pair(heads, rotation)) : std::nullopt;
}

// The attention that reads these keys; the names are those of decode/primitive.cpp and quantized/primitive.cpp.
const Item* attention_of(const Plan& plan, const mx::array& keys) {
  for (const Item* reader : plan.readers(keys)) {
    const bool attends =
        reader->name == "DecodeAttention" || reader->name == "PagedAttention" || reader->name == "QuantizedAttention";
    if (attends && reader->inputs[1].id() == keys.id()) {
      return reader;
    }
  }
  return nullptr;
}

}  // namespace

Arrays HeadsCall::inputs() const {
  Arrays inputs{queries.rows, keys.rows, values, rotation.offset, where};
  inputs.insert(inputs.end(), caches.begin(), caches.end());
  return inputs;
}

std::string HeadsCall::name() const {
  return std::string(keys.norm ? "head norms + rope + " : "rope + ") + (form ? "quantized append" : "append");
}

std::optional<HeadsCall> heads_call(const Plan& plan, const Item& append) {
  const auto keys = rotated(plan, append.inputs[0]);
  const Item* attention = attention_of(plan, append.outputs[0]);
  const auto queries = attention ? rotated(plan, attention->inputs[0]) : std::nullopt;
  const mx::array values = source_of(plan, append.inputs[1]);
  if (!keys || !queries || !same(queries->second, keys->second) || !is_token(append.inputs[1])) {
    return std::nullopt;
  }
  const mx::array& out = queries->first.out;
  std::optional<QuantizedAppendForm> form;
  if (append.name == kQuantizedCacheAppend) {
    form = quantized_append_form(append.outputs[0]);
  }
  const auto alike = [&](const mx::array& in, int group = 1) {
    return in.dtype() == out.dtype() && in.shape(-1) * group == out.shape(3);
  };
  const auto caches = append.inputs.begin() + 2;
  const bool fits = form ? out.itemsize() == 2 && alike(caches[1], form->group) && alike(caches[4], form->group)
                         : alike(caches[0]) && alike(caches[1]);
  if (!fits || !alike(keys->first.out) || !alike(append.inputs[1]) || out.shape(3) > HeadsParams::kMostDim ||
      values.dtype() != out.dtype() || keys->first.out.id() == out.id()) {
    return std::nullopt;
  }
  return HeadsCall{queries->first, keys->first,          values,    keys->second, {caches, append.inputs.end() - 1},
                   append.outputs, append.inputs.back(), attention, form};
}

void make_contiguous(HeadsCall& call, const mx::Stream& stream) {
  auto& encoder = mx::cu::get_command_encoder(stream);
  for (mx::array* rows : {&call.queries.rows, &call.keys.rows, &call.values}) {
    *rows = contiguous(*rows, encoder, stream);
  }
}

void read_rows(HeadsParams& params, const HeadsCall& call, KernelNode& node) {
  params.rows[0] = node.reads(call.queries.rows);
  params.rows[1] = node.reads(call.keys.rows);
  params.rows[2] = node.reads(call.values);
}

HeadsParams heads_params(HeadsCall& call, KernelNode& node) {
  HeadsParams params{};
  const Heads* heads[2] = {&call.queries, &call.keys};
  for (int i = 0; i < 2; ++i) {
    params.norms[i] = node.reads(heads[i]->norm);
    params.eps[i] = heads[i]->eps;
    params.heads[i] = heads[i]->count;
    if (!call.form) {
      call.appended[i].copy_shared_buffer(call.caches[i]);
      node.reads(call.caches[i]);
      params.caches[i] = node.writes(call.appended[i]);
    }
  }
  params.where = node.reads<int>(call.where);
  params.offset = node.reads<int>(call.rotation.offset);
  params.offset_distance = call.rotation.offset.size() > 1 ? static_cast<int>(call.rotation.offset.strides(0)) : 0;
  params.freqs = node.reads<float>(call.rotation.freqs);
  params.log2_base = call.rotation.freqs ? 0.0f : std::log2(call.rotation.base);
  params.scale = call.rotation.scale;
  params.capacity = call.caches[0].shape(2);
  params.batch = call.queries.out.shape(0);
  params.dim = call.queries.out.shape(3);
  params.rotated = call.rotation.dims;
  params.neighbours = call.rotation.traditional;
  return params;
}

Item heads_item(const HeadsCall& call) {
  Arrays outputs{call.queries.out};
  outputs.insert(outputs.end(), call.appended.begin(), call.appended.end());
  return {call.name(), call.inputs(), outputs, [call = call](const mx::Stream& stream) mutable {
            make_contiguous(call, stream);
            allocate(call.queries.out, stream);
            KernelNode node(mx::cu::get_command_encoder(stream));
            HeadsParams params = heads_params(call, node);
            read_rows(params, call, node);
            params.queries = node.writes(call.queries.out);
            static KernelModule kernels("heads");
            const std::string dtype = type_name(call.queries.out.dtype());
            CUfunction kernel =
                with_pdl(kernels.function(call.form ? kernel_for(kQuantized, dtype, call.form->bits) : kernel_for(kPlain, dtype)));
            const int all = params.batch * (params.heads[0] + 2 * params.heads[1]);
            const dim3 grid(ceil_div(all, HeadsParams::kWarps));
            if (call.form) {
              const QuantizedRows to = quantized_rows(call.caches, call.appended, call.form->group, node);
              node.launch(kernel, grid, 32 * HeadsParams::kWarps, 0, QuantizedHeadsParams{params, to});
            } else {
              node.launch(kernel, grid, 32 * HeadsParams::kWarps, 0, params);
            }
          }};
}

}  // namespace mlx_cuda
