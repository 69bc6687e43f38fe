#include "attention/flash/primitive.h"

#include "attention/composed.h"
#include "attention/cudnn/attention.h"
#include "attention/flash/launch.h"
#include "attention/flash/mask_tiles.h"
#include "attention/flash/params.h"
#include "attention/flash/plan.h"
#include "attention/primitive.h"
#include "runtime/device_code.h"
#include "runtime/lanes.h"
#include "runtime/memory.h"
#include "runtime/node.h"
#include "runtime/status.h"
#include "runtime/tensor_map.h"

#include <mlx/backend/cuda/utils.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>

namespace mlx_cuda {

namespace {

FlashCall call_of(const mx::array& q, const mx::array& v, const MaybeArray& mask, bool sinks, const AttentionOptions& options) {
  return {
      .dtype = q.dtype(),
      .head_dim = q.shape(-1),
      .v_head_dim = v.shape(-1),
      .masked = mask.has_value(),
      .biased = mask && mask->dtype() != mx::bool_,
      .softcap = options.softcap > 0,
      .sinks = sinks,
      .lse = options.lse,
  };
}

// Where the dimensions of q, k and v are; the batch may be none.
struct Axes {
  int batch;
  int head;
  int row;
};

// The kernels' parameters; only lengths, the strides of lse, and what `encode_flash` was not given are set.
struct FlashInputs {
  FlashParams params{};
  Axes axes;
  FlashOperands operands;
  Arrays vectors{};  // that params point to

  // The address of a vector, copied if its elements are not adjacent; or null.
  void* add(const MaybeArray& vector, CommandEncoder& encoder, const mx::Stream& stream) {
    if (!vector) {
      return nullptr;
    }
    vectors.push_back(with_adjacent_elements(*vector, encoder, stream));
    return mx::gpu_ptr<void>(vectors.back());
  }
};

FlashStrides strides_along(const mx::array& in, const Axes& axes) {
  return {axes.batch < 0 ? 0 : in.strides(axes.batch), in.strides(axes.head), in.strides(axes.row)};
}

void describe(FlashParams& params, const Axes& axes, const FlashOperands& operands, const AttentionOptions& options) {
  params.q_strides = strides_along(operands.q, axes);
  params.k_strides = strides_along(operands.k, axes);
  params.v_strides = strides_along(operands.v, axes);
  params.heads = operands.q.shape(axes.head);
  params.kv_heads = operands.k.shape(axes.head);
  params.head_dim = operands.q.shape(-1);
  params.v_head_dim = operands.v.shape(-1);
  params.scale = options.scale;
  params.softcap = options.softcap;
  // A window longer than everything is none, and cannot overflow.
  const int longest = params.q_length + params.kv_length;
  params.window_left = std::min(options.window_left, longest);
  params.window_right = std::min(options.window_right, longest);
}

// Gives the outputs their memory, has a mask looked at, and encodes the kernel.
void encode_flash(
    FlashInputs given, Arrays& outputs, const AttentionOptions& options, CommandEncoder& encoder, const mx::Stream& stream) {
  auto& [params, axes, operands, vectors] = given;
  FlashCall call = call_of(operands.q, operands.v, operands.mask, params.sinks, options);
  const bool sm90 = on_flash_sm90(call);
  for (mx::array* in : {&operands.q, &operands.k, &operands.v}) {
    *in = (sm90 ? copyable(*in) : rows_readable(*in)) ? *in : contiguous_copy(*in, encoder, stream);
  }
  if (sm90 && call.biased && takes_bias(call)) {
    operands.mask = copyable_bias(*operands.mask, encoder, stream);
    call.biased = copyable_mask(*operands.mask);
  }
  const std::optional<FlashPlan> plan = plan_flash(call);
  if (!plan) {
    throw Unavailable("[attention] No flash kernel takes these head dimensions.");
  }
  describe(params, axes, operands, options);
  if (axes.batch < 0) {
    allocate(outputs[0], stream);
  } else {
    allocate_like_queries(outputs[0], operands.q, stream);
  }
  if (options.lse) {
    allocate(outputs[1], stream);
  }
  if (operands.mask) {
    const bool shifting = !params.sinks && !options.lse;  // both see a shift of a whole row
    const auto [found, memory] = summarize_mask(*operands.mask, plan->rows, plan->keys, shifting, encoder, stream);
    params.mask = found;
    vectors.push_back(memory);
    vectors.push_back(*operands.mask);
  }
  KernelNode node(encoder);
  params.q = node.reads(operands.q);
  params.k = node.reads(operands.k);
  params.v = node.reads(operands.v);
  for (const mx::array& in : vectors) {
    node.reads(in);
  }
  params.out = node.writes(outputs[0]);
  params.out_strides = strides_along(outputs[0], axes);
  params.lse = options.lse ? node.writes<float>(outputs[1]) : nullptr;
  take_lane(encoder);
  launch_flash(*plan, params, operands, node);
}

class Flash final : public AttentionPrimitive {
 public:
  using AttentionPrimitive::AttentionPrimitive;

  DEFINE_NAME(FlashAttention)

 protected:
  Arrays compose(const Arrays& inputs) const override {
    const AttentionArrays in = arrays(inputs);
    // cuDNN has a backward.
    const auto& given = options();
    const bool band = given.window_right == 0 || (given.window_right < 0 && given.window_left < 0);
    if (band && given.softcap == 0 && !in.mask && !in.starts && !in.ends && in.q.dtype() != mx::float32 &&
        why_attention_unsupported(in, given, queue()).empty()) {
      return attention(in, given, queue());
    }
    return composed_attention(in, given, queue());
  }

  void encode(const Arrays& inputs, Arrays& outputs, CommandEncoder& encoder) override {
    const AttentionArrays in = arrays(inputs);
    FlashInputs given{.axes = {0, 1, 2}, .operands = {in.q, in.k, in.v, in.mask}};
    FlashParams& params = given.params;
    params.batch = in.q.shape(0);
    params.q_length = in.q.shape(2);
    params.kv_length = in.k.shape(2);
    params.lse_strides[0] = std::int64_t{in.q.shape(1)} * params.q_length;
    params.lse_strides[1] = params.q_length;
    params.starts = static_cast<const int*>(given.add(in.starts, encoder, stream()));
    params.ends = static_cast<const int*>(given.add(in.ends, encoder, stream()));
    params.sinks = given.add(in.sinks, encoder, stream());
    encode_flash(std::move(given), outputs, options(), encoder, stream());
  }
};

struct PackedState {
  AttentionOptions options;
  PackedLengths longest;

  bool operator==(const PackedState&) const = default;
};

class FlashVarlen final : public Stateful<PackedState> {
 public:
  using Stateful::Stateful;

  DEFINE_NAME(FlashVarlenAttention)

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    const mx::array& q = inputs[0];
    const mx::Shape out{q.shape(0), q.shape(1), inputs[2].shape(2)};
    return state_.options.lse ? std::vector{out, mx::Shape{q.shape(1), q.shape(0)}} : std::vector{out};
  }

 protected:
  bool is_composable() const override {
    return false;
  }

  // How many rows each sequence has is known to the GPU alone.
  Arrays compose(const Arrays&) const override {
    throw std::invalid_argument(
        "[attention_varlen] Neither gradients nor vmap are there for packed sequences; use attention with lengths instead.");
  }

  void encode(const Arrays& inputs, Arrays& outputs, CommandEncoder& encoder) override {
    FlashInputs given{.axes = {-1, 1, 0}, .operands = {inputs[0], inputs[1], inputs[2], {}}};
    FlashParams& params = given.params;
    params.cu_q = static_cast<const int*>(given.add(inputs[3], encoder, stream()));
    params.cu_k = static_cast<const int*>(given.add(inputs[4], encoder, stream()));
    params.sinks = inputs.size() > 5 ? given.add(inputs[5], encoder, stream()) : nullptr;
    params.batch = inputs[3].shape(0) - 1;
    params.q_length = std::max(state_.longest.q, 1);
    params.kv_length = std::max(state_.longest.k, 1);
    params.lse_strides[1] = inputs[0].shape(0);
    encode_flash(std::move(given), outputs, state_.options, encoder, stream());
  }
};

}  // namespace

std::string flash_kernel(const AttentionArrays& in, const AttentionOptions& options) {
  FlashCall call = call_of(in.q, in.v, in.mask, in.sinks.has_value(), options);
  call.biased = call.biased && in.mask->shape(3) * in.mask->itemsize() % 16 == 0;
  const bool known = call.dtype == mx::float16 || call.dtype == mx::bfloat16 || call.dtype == mx::float32;
  const bool whole = call.head_dim % 8 == 0 && call.v_head_dim % 8 == 0;
  const auto plan = known && whole && compute_capability() >= 80 ? plan_flash(call) : std::nullopt;
  return plan ? plan->source + (' ' + plan->kernel) : "";
}

Arrays flash_attention(const AttentionArrays& in, const AttentionOptions& options, const mx::Stream& stream) {
  return attention_by<Flash>(in, options, stream);
}

Arrays flash_varlen(const PackedArrays& in, PackedLengths longest, const AttentionOptions& options, const mx::Stream& stream) {
  const Arrays inputs = joined({in.q, in.k, in.v, in.cu_q, in.cu_k}, in.sinks);
  return attention_results(std::make_shared<FlashVarlen>(stream, PackedState{options, longest}), inputs);
}

}  // namespace mlx_cuda
