#include "decoding/token/token.h"

#include "attention/decode/launch.h"
#include "attention/decode/primitive.h"
#include "decoding/graph/views.h"
#include "decoding/token/params.h"
#include "device/numbers.cuh"
#include "runtime/device_code.h"
#include "runtime/kernel_table.h"
#include "runtime/memory.h"
#include "runtime/pdl.h"

#include <algorithm>
#include <vector>

namespace mlx_cuda {

namespace {

// Rows of the cache for each cluster on the average: where there are more, decode_direct.cu has more blocks for them.
constexpr int kMostKeys = 1024;

int row_blocks(int group) {
  return ceil_div(group, TokenTraits::kMostRows);
}

// The arrays that the kernel reads besides the rows of the projections.
std::vector<MaybeArray> settled_inputs(const HeadsCall& call, const AttentionArrays& in) {
  return {call.where, call.rotation.offset, call.caches[0], call.caches[1], in.starts, in.ends};
}

// Whether all of that is there before the graph begins.
bool is_settled(const Plan& plan, const HeadsCall& call, const AttentionArrays& in) {
  const auto arrays = settled_inputs(call, in);
  return std::all_of(arrays.begin(), arrays.end(), [&](const MaybeArray& array) {
    const Item* giver = array ? plan.giver(source_of(plan, *array)) : nullptr;
    return !giver || giver->name == kStepInput;
  });
}

void launch(TokenCall call, const mx::Stream& stream) {
  make_contiguous(call.heads, stream);
  make_readable(call, stream);
  allocate(call.out, stream);
  KernelNode node(mx::cu::get_command_encoder(stream));
  TokenParams params = token_params(call, node);
  read_rows(params.heads, call.heads, node);
  params.decode.out = node.writes(call.out);
  const TokenTraits traits{params.heads.dim <= 64 ? 64 : params.heads.dim <= 128 ? 128 : 256};
  static KernelModule kernels("token_sm90");
  static constexpr auto table = std::to_array<KernelRow<std::string_view, int>>({MLX_CUDA_TOKEN_KERNELS(MLX_CUDA_KERNEL_ROW)});
  CUfunction kernel = with_pdl(kernels.function(kernel_for(table, type_name(call.out.dtype()), traits.width)));
  node.launch(
      kernel, dim3(TokenTraits::kParts, params.decode.kv_heads * params.row_blocks, params.decode.batch), 32 * TokenTraits::kWarps,
      traits.shared_bytes(params.rows), params);
}

}  // namespace

void make_readable(TokenCall& call, const mx::Stream& stream) {
  auto& encoder = mx::cu::get_command_encoder(stream);
  const auto before = settled_inputs(call.heads, call.in);
  for (auto* array : {&call.in.starts, &call.in.ends, &call.in.sinks}) {
    if (*array) {
      *array = with_adjacent_elements(**array, encoder, stream);
    }
  }
  const auto after = settled_inputs(call.heads, call.in);  // copies are made by kernels of the graph
  call.settled =
      call.settled && std::equal(before.begin(), before.end(), after.begin(), [](const MaybeArray& one, const MaybeArray& other) {
        return !one || one->id() == other->id();
      });
}

TokenParams token_params(TokenCall& call, KernelNode& node) {
  TokenParams params{};
  params.heads = heads_params(call.heads, node);
  params.settled = call.settled;
  DecodeParams& decode = params.decode;
  const HeadsParams& heads = params.heads;
  static_cast<DecodeSizes&>(decode) = {
      .batch = heads.batch,
      .kv_heads = heads.heads[1],
      .group = heads.heads[0] / heads.heads[1],
      .q_length = 1,
      .kv_length = static_cast<int>(heads.capacity),
      .head_dim = heads.dim,
      .value_dim = heads.dim,
      .window_left = call.options.window_left,
      .window_right = call.options.window_right,
  };
  params.row_blocks = row_blocks(decode.group);
  params.rows = ceil_div(decode.group, params.row_blocks);
  decode.tile_keys = DirectTraits::kTileKeys;
  decode.softcap = call.options.softcap;
  decode.scale = decode.softcap > 0 ? call.options.scale / decode.softcap : call.options.scale * kLog2e;
  decode.plain = decode.softcap == 0 && call.options.scale > 0;
  decode.k = heads.caches[0];
  decode.v = heads.caches[1];
  decode.k_strides = strides_of(call.heads.appended[0]);
  decode.v_strides = strides_of(call.heads.appended[1]);
  decode.starts = node.reads<int>(call.in.starts);
  decode.ends = node.reads<int>(call.in.ends);
  decode.sinks = node.reads(call.in.sinks);
  decode.out_strides = strides_of(call.out);
  return params;
}

Arrays TokenCall::inputs() const {
  Arrays inputs = heads.inputs();
  for (const auto& optional : {in.starts, in.ends, in.sinks}) {
    if (optional) {
      inputs.push_back(*optional);
    }
  }
  return inputs;
}

Arrays TokenCall::outputs() const {
  return {out, heads.appended[0], heads.appended[1]};
}

std::string TokenCall::name() const {
  return heads.name() + " + attention";
}

std::optional<TokenCall> token_call(const Plan& plan, const HeadsCall& heads) {
  const mx::array& out = heads.attention->outputs[0];
  const auto attention = decode_call(out);
  if (!attention || !is_hopper() || reader_of(plan, heads.queries.out) != heads.attention) {
    return std::nullopt;
  }
  const auto& [in, options] = *attention;
  const int kv_heads = heads.caches[0].shape(1);
  const int clusters = out.shape(0) * kv_heads;
  const bool fits = in.k.id() == heads.appended[0].id() && in.v.id() == heads.appended[1].id() && !in.mask && !options.lse &&
                    out.shape() == heads.queries.out.shape() && out.shape(3) % 8 == 0 &&
                    2 * clusters * row_blocks(heads.queries.count / kv_heads) * TokenTraits::kParts <= multiprocessors() &&
                    heads.caches[0].shape(2) <= kMostKeys * clusters;
  return fits ? std::optional(TokenCall{heads, in, options, is_settled(plan, heads, in), out}) : std::nullopt;
}

Item token_item(const TokenCall& call) {
  return {call.name(), call.inputs(), call.outputs(), [call](const mx::Stream& stream) { launch(call, stream); }};
}

}  // namespace mlx_cuda
