#include "attention/flash/primitive.h"

#include "attention/cudnn/forward.h"
#include "attention/flash/launch.h"
#include "attention/flash/mask_tiles.h"
#include "attention/flash/params.h"
#include "attention/flash/plan.h"
#include "runtime/device_code.h"
#include "runtime/lanes.h"
#include "runtime/memory.h"
#include "runtime/tensor_map.h"

#include <mlx/backend/cuda/utils.h>
#include <mlx/ops.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace mlx_cuda {

namespace {

FlashCall call_of(
    const mx::array& q,
    const mx::array& v,
    const std::optional<mx::array>& mask,
    bool sinks,
    const AttentionOptions& options,
    bool lse) {
  return {
      .dtype = q.dtype(),
      .head_dim = q.shape(-1),
      .v_head_dim = v.shape(-1),
      .masked = mask.has_value(),
      .biased = mask && mask->dtype() != mx::bool_,
      .softcap = options.softcap > 0,
      .sinks = sinks,
      .lse = lse,
  };
}

// What is the same for both primitives: heads and rows of the operands are there, all else is to be filled in.
class FlashBase : public Fused {
 public:
  FlashBase(const mx::Stream& stream, const AttentionOptions& options, bool with_lse)
      : Fused(stream), options_(options), with_lse_(with_lse) {}

 protected:
  bool same_options(const FlashBase& that) const {
    return options_ == that.options_ && with_lse_ == that.with_lse_;
  }

  // Where the dimensions of q, k and v are; the batch may be none.
  struct Axes {
    int batch;
    int head;
    int row;
  };

  // Gives out and lse their memory, has a mask looked at, and encodes the kernel. `extra` are further inputs that `params` point
  // to.
  void encode_kernel(
      FlashParams params,
      const Axes& axes,
      const std::vector<mx::array>& inputs,
      const std::optional<mx::array>& mask,
      const std::vector<mx::array>& extra,
      std::vector<mx::array>& outputs,
      mx::cu::CommandEncoder& encoder) {
    FlashCall call = call_of(inputs[0], inputs[2], mask, params.sinks, options_, with_lse_);
    const bool sm90 = on_flash_sm90(call);
    auto operand = [&](const mx::array& in) {
      return (sm90 ? copyable(in) : rows_readable(in)) ? in : contiguous_copy(in, encoder, stream());
    };
    FlashOperands operands{operand(inputs[0]), operand(inputs[1]), operand(inputs[2]), mask};
    if (sm90 && call.biased && takes_bias(call)) {
      operands.mask = copyable_bias(*mask, encoder, stream());
      call.biased = copyable_mask(*operands.mask);
    }
    const std::optional<FlashPlan> plan = plan_flash(call);
    if (!plan) {
      throw std::runtime_error("[attention] No flash kernel takes these head dimensions.");
    }
    describe(params, axes, operands);
    allocate_outputs(params, axes, operands.q, outputs);
    std::vector<mx::array> named{operands.q, operands.k, operands.v};
    named.insert(named.end(), extra.begin(), extra.end());
    if (mask) {
      const bool shifting = !params.sinks && !params.lse;  // both see a shift of a whole row
      const auto [found, memory] = summarize_mask(*operands.mask, plan->rows, plan->keys, shifting, encoder, stream());
      params.mask = found;
      named.push_back(memory);
      named.push_back(*operands.mask);
    }
    for (const mx::array& in : named) {
      encoder.set_input_array(in);
    }
    for (const mx::array& out : outputs) {
      encoder.set_output_array(out);
    }
    take_lane(encoder);
    point(params, axes, operands, outputs[0]);
    launch_flash(*plan, params, operands, encoder);
  }

  // A vector whose elements are adjacent.
  mx::array adjacent(const mx::array& in, mx::cu::CommandEncoder& encoder) {
    return in.shape(0) == 1 || in.strides(0) == 1 ? in : contiguous_copy(in, encoder, stream());
  }

  AttentionOptions options_;
  bool with_lse_;

 private:
  void describe(FlashParams& params, const Axes& axes, const FlashOperands& operands) const {
    params.heads = operands.q.shape(axes.head);
    params.kv_heads = operands.k.shape(axes.head);
    params.head_dim = operands.q.shape(-1);
    params.v_head_dim = operands.v.shape(-1);
    params.scale = options_.scale;
    params.softcap = options_.softcap;
    // A window longer than everything is none, and cannot overflow.
    const int longest = params.q_length + params.kv_length;
    params.window_left = std::min(options_.window_left, longest);
    params.window_right = std::min(options_.window_right, longest);
  }

  // Projections leave q as a transposed [B, T, H, D]; the output follows it, so that the next reshape needs no copy.
  void allocate_outputs(FlashParams& params, const Axes& axes, const mx::array& q, std::vector<mx::array>& outputs) {
    const std::int64_t heads = params.heads;
    const bool rows_first = axes.batch >= 0 && params.q_length > 1 && heads > 1 && q.strides(axes.head) == params.head_dim &&
                            q.strides(axes.row) == heads * params.head_dim;
    if (rows_first) {
      const std::int64_t dim = params.v_head_dim;
      allocate(outputs[0], {params.q_length * heads * dim, dim, heads * dim, 1}, stream());
    } else {
      allocate(outputs[0], stream());
    }
    if (with_lse_) {
      allocate(outputs[1], stream());
      params.lse = mx::gpu_ptr<float>(outputs[1]);
    }
  }

  static void point(FlashParams& params, const Axes& axes, const FlashOperands& operands, mx::array& out) {
    auto strides = [&](const mx::array& of) {
      return FlashStrides{axes.batch < 0 ? 0 : of.strides(axes.batch), of.strides(axes.head), of.strides(axes.row)};
    };
    params.q = mx::gpu_ptr<void>(operands.q);
    params.k = mx::gpu_ptr<void>(operands.k);
    params.v = mx::gpu_ptr<void>(operands.v);
    params.out = mx::gpu_ptr<void>(out);
    params.q_strides = strides(operands.q);
    params.k_strides = strides(operands.k);
    params.v_strides = strides(operands.v);
    params.out_strides = strides(out);
  }
};

class Flash final : public FlashBase {
 public:
  // `given`: whether there are a mask, starts, ends and sinks, which follow q, k and v in this order.
  Flash(const mx::Stream& stream, const AttentionOptions& options, bool with_lse, const std::array<bool, 4>& given)
      : FlashBase(stream, options, with_lse), given_(given) {}

  const char* name() const override {
    return "FlashAttention";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& that = static_cast<const Flash&>(other);
    return same_options(that) && given_ == that.given_;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    mx::Shape rows = inputs[0].shape();
    rows.pop_back();
    mx::Shape out = rows;
    out.push_back(inputs[2].shape(3));
    return with_lse_ ? std::vector{out, rows} : std::vector{out};
  }

 protected:
  std::vector<mx::array> compose(const std::vector<mx::array>& inputs) const override {
    const AttentionExtras given = extras(inputs);
    // cuDNN has a backward.
    const bool band = options_.window_right == 0 || (options_.window_right < 0 && options_.window_left < 0);
    if (band && options_.softcap == 0 && !given.mask && !given.starts && !given.ends && inputs[0].dtype() != mx::float32) {
      const CudnnOptions options{options_.scale, options_.window_right == 0, options_.window_left};
      if (why_attention_unsupported(inputs[0], inputs[1], inputs[2], given.sinks, options, with_lse_, queue()).empty()) {
        return attention(inputs[0], inputs[1], inputs[2], given.sinks, options, with_lse_, queue());
      }
    }
    std::vector<mx::array> results = composed_attention_and_lse(inputs[0], inputs[1], inputs[2], given, options_, queue());
    if (!with_lse_) {
      results.pop_back();
    }
    return results;
  }

  void encode(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs, mx::cu::CommandEncoder& encoder) override {
    const auto [mask, starts, ends, sinks] = extras(inputs);
    FlashParams params{};
    params.batch = inputs[0].shape(0);
    params.q_length = inputs[0].shape(2);
    params.kv_length = inputs[1].shape(2);
    params.lse_strides[0] = std::int64_t{inputs[0].shape(1)} * params.q_length;
    params.lse_strides[1] = params.q_length;
    std::vector<mx::array> extra;
    auto pointer = [&](const std::optional<mx::array>& vector) -> void* {
      if (!vector) {
        return nullptr;
      }
      extra.push_back(adjacent(*vector, encoder));
      return mx::gpu_ptr<void>(extra.back());
    };
    params.starts = static_cast<const int*>(pointer(starts));
    params.ends = static_cast<const int*>(pointer(ends));
    params.sinks = pointer(sinks);
    encode_kernel(params, {0, 1, 2}, inputs, mask, extra, outputs, encoder);
  }

 private:
  AttentionExtras extras(const std::vector<mx::array>& inputs) const {
    std::size_t next = 3;
    auto take = [&](bool there) { return there ? std::optional(inputs[next++]) : std::nullopt; };
    AttentionExtras extras;
    extras.mask = take(given_[0]);
    extras.starts = take(given_[1]);
    extras.ends = take(given_[2]);
    extras.sinks = take(given_[3]);
    return extras;
  }

  std::array<bool, 4> given_;
};

class FlashVarlen final : public FlashBase {
 public:
  FlashVarlen(const mx::Stream& stream, const AttentionOptions& options, bool with_lse, int max_q, int max_k)
      : FlashBase(stream, options, with_lse), max_q_(max_q), max_k_(max_k) {}

  const char* name() const override {
    return "FlashVarlenAttention";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& that = static_cast<const FlashVarlen&>(other);
    return same_options(that) && max_q_ == that.max_q_ && max_k_ == that.max_k_;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    const mx::array& q = inputs[0];
    const mx::Shape out{q.shape(0), q.shape(1), inputs[2].shape(2)};
    return with_lse_ ? std::vector{out, mx::Shape{q.shape(1), q.shape(0)}} : std::vector{out};
  }

 protected:
  // How many rows each sequence has is known to the GPU alone.
  std::vector<mx::array> compose(const std::vector<mx::array>&) const override {
    throw std::invalid_argument(
        "[attention_varlen] Neither gradients nor vmap are there for packed sequences; use attention with lengths instead.");
  }

  void encode(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs, mx::cu::CommandEncoder& encoder) override {
    std::vector<mx::array> extra;
    for (std::size_t i = 3; i < inputs.size(); ++i) {
      extra.push_back(adjacent(inputs[i], encoder));
    }
    FlashParams params{};
    params.cu_q = mx::gpu_ptr<int>(extra[0]);
    params.cu_k = mx::gpu_ptr<int>(extra[1]);
    params.sinks = extra.size() > 2 ? mx::gpu_ptr<void>(extra[2]) : nullptr;
    params.batch = inputs[3].shape(0) - 1;
    params.q_length = std::max(max_q_, 1);
    params.kv_length = std::max(max_k_, 1);
    params.lse_strides[1] = inputs[0].shape(0);
    encode_kernel(params, {-1, 1, 0}, inputs, std::nullopt, extra, outputs, encoder);
  }

 private:
  int max_q_;
  int max_k_;
};

std::vector<mx::array> make(std::shared_ptr<FlashBase> primitive, bool with_lse, const std::vector<mx::array>& inputs) {
  std::vector<mx::Dtype> dtypes{inputs[0].dtype()};
  if (with_lse) {
    dtypes.push_back(mx::float32);
  }
  std::vector<mx::Shape> shapes = primitive->output_shapes(inputs);
  return mx::array::make_arrays(std::move(shapes), dtypes, std::move(primitive), inputs);
}

}  // namespace

std::string flash_kernel(
    const mx::array& q, const mx::array& v, const AttentionExtras& extras, const AttentionOptions& options, bool with_lse) {
  FlashCall call = call_of(q, v, extras.mask, extras.sinks.has_value(), options, with_lse);
  call.biased = call.biased && extras.mask->shape(3) * extras.mask->itemsize() % 16 == 0;
  const bool known = call.dtype == mx::float16 || call.dtype == mx::bfloat16 || call.dtype == mx::float32;
  const bool whole = call.head_dim % 8 == 0 && call.v_head_dim % 8 == 0;
  const auto plan = known && whole && compute_capability() >= 80 ? plan_flash(call) : std::nullopt;
  return plan ? plan->source + (' ' + plan->kernel) : "";
}

std::vector<mx::array> flash_attention(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    const AttentionExtras& extras,
    const AttentionOptions& options,
    bool with_lse,
    const mx::Stream& stream) {
  std::vector<mx::array> inputs{q, k, v};
  std::array<bool, 4> given{};
  const std::array all{&extras.mask, &extras.starts, &extras.ends, &extras.sinks};
  for (std::size_t i = 0; i < all.size(); ++i) {
    given[i] = all[i]->has_value();
    if (given[i]) {
      inputs.push_back(**all[i]);
    }
  }
  return make(std::make_shared<Flash>(stream, options, with_lse, given), with_lse, inputs);
}

std::vector<mx::array> flash_varlen(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    const mx::array& cu_q,
    const mx::array& cu_k,
    const std::optional<mx::array>& sinks,
    int max_q,
    int max_k,
    const AttentionOptions& options,
    bool with_lse,
    const mx::Stream& stream) {
  std::vector<mx::array> inputs{q, k, v, cu_q, cu_k};
  if (sinks) {
    inputs.push_back(*sinks);
  }
  return make(std::make_shared<FlashVarlen>(stream, options, with_lse, max_q, max_k), with_lse, inputs);
}

}  // namespace mlx_cuda
