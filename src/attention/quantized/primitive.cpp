#include "attention/quantized/primitive.h"

#include "attention/composed.h"
#include "attention/decode/launch.h"
#include "attention/decode/quantized_params.h"
#include "attention/primitive.h"
#include "runtime/lanes.h"
#include "runtime/memory.h"
#include "runtime/pdl.h"

#include <mlx/ops.h>

#include <bit>
#include <cstdint>
#include <limits>
#include <memory>

namespace mlx_cuda {

namespace {

struct State {
  AttentionOptions options;
  GivenArrays given;
  QuantizedForm form;
  bool biased;

  bool operator==(const State&) const = default;
};

DecodeProblem problem_of(const AttentionArrays& in, const QuantizedCache& cache, const AttentionOptions& options) {
  const mx::array& pages = cache.keys.w;
  return {
      .dtype = in.q.dtype(),
      .sizes =
          {
              .batch = in.q.shape(0),
              .kv_heads = pages.shape(1),
              .group = in.q.shape(1) / pages.shape(1),
              .q_length = in.q.shape(2),
              .kv_length = in.table ? in.table->shape(1) * pages.shape(2) : pages.shape(2),
              .head_dim = in.q.shape(3),
              .value_dim = cache.values.inner(),
              .window_left = options.window_left,
              .window_right = options.window_right,
          },
      .paged = in.table.has_value(),
      .mask = in.mask.has_value(),
      .key_mask = false,
      .ragged = in.starts || in.ends,
      .copyable = false,
      .shared_values = false,
  };
}

DecodePlan plan_of(const DecodeProblem& problem, const QuantizedForm& form) {
  return plan_quantized(problem, form.mode != "affine", form.bits);
}

// Whether the kernel can read an array of scales without a copy, and its row stride fits.
bool is_near(const mx::array& in) {
  return elements_adjacent(in) && in.strides(2) * static_cast<std::int64_t>(in.itemsize()) <= std::numeric_limits<int>::max() &&
         in.strides(2) >= 0;
}

QuantizedWeights readable_cache(const QuantizedWeights& in, CommandEncoder& encoder, const mx::Stream& stream) {
  QuantizedWeights out = in;
  if (!rows_readable(in.w) || !is_near(in.w)) {
    out.w = contiguous_copy(in.w, encoder, stream);
  }
  if (!is_near(in.scales) || (in.biases && in.biases->strides() != in.scales.strides())) {
    out.scales = contiguous_copy(in.scales, encoder, stream);
    out.biases = in.biases ? std::optional(contiguous_copy(*in.biases, encoder, stream)) : std::nullopt;
  }
  return out;
}

PackedStrides packed_strides(const mx::array& in) {
  const auto bytes = static_cast<std::int64_t>(in.itemsize());
  return {in.strides(0) * bytes, in.strides(1) * bytes, static_cast<int>(in.strides(2) * bytes)};
}

QuantizedOperand operand(const QuantizedWeights& weights, KernelNode& node) {
  QuantizedOperand out{};
  out.rows = node.reads(weights.w);
  const auto* scales = node.reads<char>(weights.scales);
  out.scales = scales;
  out.biases_after = weights.biases ? node.reads<char>(*weights.biases) - scales : 0;
  out.row_strides = packed_strides(weights.w);
  out.scale_strides = packed_strides(weights.scales);
  out.group_shift = std::countr_zero(static_cast<unsigned>(weights.group_size));
  out.nvfp4 = weights.mode == "nvfp4";
  return out;
}

class QuantizedDecode final : public Stateful<State> {
 public:
  using Stateful::Stateful;

  DEFINE_NAME(QuantizedAttention)

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    return attention_shapes(inputs[0], cache(inputs).values.inner(), state_.options.lse);
  }

 protected:
  Arrays compose(const Arrays& inputs) const override {
    AttentionArrays in = arrays(inputs);
    const QuantizedCache from = cache(inputs);
    in.k = values_of(from.keys, in.q.dtype(), queue());
    in.v = values_of(from.values, in.q.dtype(), queue());
    if (in.table) {
      in.k = pages_in_order(in.k, *in.table, *in.ends, queue());
      in.v = pages_in_order(in.v, *in.table, *in.ends, queue());
    }
    return composed_attention(in, state_.options, queue());
  }

  void encode(const Arrays& inputs, Arrays& outputs, CommandEncoder& encoder) override {
    AttentionArrays in = arrays(inputs);
    QuantizedCache from = cache(inputs);
    make_readable(in, encoder, stream());
    from.keys = readable_cache(from.keys, encoder, stream());
    from.values = readable_cache(from.values, encoder, stream());
    in.k = from.keys.w;
    in.v = from.values.w;
    allocate_like_queries(outputs[0], in.q, stream());
    if (state_.options.lse) {
      allocate(outputs[1], stream());
    }
    const DecodeProblem problem = problem_of(in, from, state_.options);
    const DecodePlan plan = plan_of(problem, state_.form);
    QuantizedParams params{};
    static_cast<DecodeParams&>(params) = decode_params(problem, plan, state_.options);
    allocate_partials(params, plan, encoder, stream());
    KernelNode node(encoder);
    set_arrays(params, in, outputs, node);
    params.keys = operand(from.keys, node);
    params.values = operand(from.values, node);
    take_lane(encoder);
    CUfunction kernel = with_pdl(module_of(plan.engine).function(plan.kernel));
    node.launch(kernel, plan.grid, plan.warps * 32, static_cast<unsigned>(plan.shared_bytes), params);
  }

 private:
  QuantizedCache cache(const Arrays& inputs) const {
    const int parts = state_.biased ? 3 : 2;
    auto weights = [&](int first) -> QuantizedWeights {
      return {state_.form, inputs[first], inputs[first + 1], state_.biased ? std::optional(inputs[first + 2]) : std::nullopt};
    };
    return {weights(1), weights(1 + parts)};
  }

  AttentionArrays arrays(const Arrays& inputs) const {
    const std::size_t parts = state_.biased ? 3 : 2;
    return with_optional({inputs[0], inputs[1], inputs[1 + parts]}, state_.given, inputs, 1 + 2 * parts);
  }
};

}  // namespace

Arrays quantized_attention(
    const AttentionArrays& in, const QuantizedCache& cache, const AttentionOptions& options, const mx::Stream& stream) {
  State state{options, {}, cache.keys, cache.keys.biases.has_value()};
  Arrays inputs = inputs_with(inputs_with({in.q}, cache.keys), cache.values);
  state.given = add_optional(in, inputs);
  return attention_results(std::make_shared<QuantizedDecode>(stream, state), inputs);
}

std::string quantized_attention_kernel(const AttentionArrays& in, const QuantizedCache& cache, const AttentionOptions& options) {
  const DecodePlan plan = plan_of(problem_of(in, cache, options), cache.keys);
  return std::string(source_of(plan.engine)) + " " + plan.kernel;
}

}  // namespace mlx_cuda
