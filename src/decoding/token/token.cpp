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

void launch(
    HeadsCall call, AttentionArrays in, const AttentionOptions& options, bool settled, mx::array out, const mx::Stream& stream) {
  auto& encoder = mx::cu::get_command_encoder(stream);
  const auto before = settled_inputs(call, in);
  make_contiguous(call, stream);
  for (auto* array : {&in.starts, &in.ends, &in.sinks}) {
    if (*array) {
      *array = with_adjacent_elements(**array, encoder, stream);
    }
  }
  const auto after = settled_inputs(call, in);  // copies are made by kernels of the graph
  settled = settled && std::equal(before.begin(), before.end(), after.begin(), [](const MaybeArray& one, const MaybeArray& other) {
              return !one || one->id() == other->id();
            });
  allocate(out, stream);
  KernelNode node(encoder);
  TokenParams params{};
  params.heads = heads_params(call, node);
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
      .window_left = options.window_left,
      .window_right = options.window_right,
  };
  decode.tile_keys = DirectTraits::kTileKeys;
  decode.softcap = options.softcap;
  decode.scale = options.softcap > 0 ? options.scale / options.softcap : options.scale * kLog2e;
  decode.plain = options.softcap == 0 && options.scale > 0;
  decode.k = heads.caches[0];
  decode.v = heads.caches[1];
  decode.k_strides = strides_of(call.appended[0]);
  decode.v_strides = strides_of(call.appended[1]);
  decode.starts = node.reads<int>(in.starts);
  decode.ends = node.reads<int>(in.ends);
  decode.sinks = node.reads(in.sinks);
  decode.out = node.writes(out);
  decode.out_strides = strides_of(out);
  params.settled = settled;
  const TokenTraits traits{heads.dim <= 64 ? 64 : heads.dim <= 128 ? 128 : 256};
  static KernelModule kernels("token_sm90");
  static constexpr auto table = std::to_array<KernelRow<std::string_view, int>>({MLX_CUDA_TOKEN_KERNELS(MLX_CUDA_KERNEL_ROW)});
  CUfunction kernel = with_pdl(kernels.function(kernel_for(table, type_name(out.dtype()), traits.width)));
  node.launch(
      kernel, dim3(TokenTraits::kParts, decode.kv_heads, decode.batch), 32 * TokenTraits::kWarps, traits.shared_bytes(decode.group),
      params);
}

}  // namespace

std::optional<Item> token_item(const Plan& plan, const HeadsCall& call) {
  const mx::array& out = call.attention->outputs[0];
  const auto attention = decode_call(out);
  if (!attention || !is_hopper() || reader_of(plan, call.queries.out) != call.attention) {
    return std::nullopt;
  }
  const auto& [in, options] = *attention;
  const int kv_heads = call.caches[0].shape(1);
  const int clusters = out.shape(0) * kv_heads;
  const bool fits = in.k.id() == call.appended[0].id() && in.v.id() == call.appended[1].id() && !in.mask && !options.lse &&
                    out.shape() == call.queries.out.shape() && out.shape(3) % 8 == 0 &&
                    call.queries.count <= kTileRows * kv_heads && 2 * clusters * TokenTraits::kParts <= multiprocessors() &&
                    call.caches[0].shape(2) <= kMostKeys * clusters;
  if (!fits) {
    return std::nullopt;
  }
  Arrays inputs = call.inputs();
  for (const auto& optional : {in.starts, in.ends, in.sinks}) {
    if (optional) {
      inputs.push_back(*optional);
    }
  }
  return Item{
      call.name() + " + attention",
      inputs,
      {out, call.appended[0], call.appended[1]},
      [call = call, in = in, options = options, settled = is_settled(plan, call, in), out](const mx::Stream& stream) {
        launch(call, in, options, settled, out, stream);
      }};
}

}  // namespace mlx_cuda
