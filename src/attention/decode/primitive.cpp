#include "attention/decode/primitive.h"

#include "attention/composed.h"
#include "attention/decode/launch.h"
#include "attention/decode/traits.h"
#include "attention/paged/primitive.h"
#include "attention/primitive.h"
#include "runtime/lanes.h"
#include "runtime/memory.h"
#include "runtime/node.h"
#include "runtime/pdl.h"
#include "runtime/tensor_map.h"

#include <mlx/backend/cuda/utils.h>
#include <mlx/ops.h>

#include <algorithm>
#include <vector>

namespace mlx_cuda {

namespace {

// Whether values are the first columns of keys. Arrays that are not evaluated share nothing.
bool same_rows(const mx::array& k, const mx::array& v) {
  auto same = [&](int axis) { return k.shape(axis) == 1 || k.strides(axis) == v.strides(axis); };
  return k.data_shared_ptr() && v.data_shared_ptr() && mx::gpu_ptr<void>(k) == mx::gpu_ptr<void>(v) && same(0) && same(1) &&
         same(2) && v.shape(3) <= k.shape(3);
}

DecodeProblem problem_of(const AttentionArrays& in, const AttentionOptions& options) {
  const auto& [q, k, v, table, mask, starts, ends, sinks] = in;
  const DecodeSizes sizes{
      .batch = q.shape(0),
      .kv_heads = k.shape(1),
      .group = q.shape(1) / k.shape(1),
      .q_length = q.shape(2),
      .kv_length = table ? table->shape(1) * k.shape(2) : k.shape(2),
      .head_dim = q.shape(3),
      .value_dim = v.shape(3),
      .window_left = options.window_left,
      .window_right = options.window_right,
  };
  return {
      .dtype = q.dtype(),
      .sizes = sizes,
      .paged = table.has_value(),
      .mask = mask.has_value(),
      .key_mask = mask && mask->dtype() == mx::bool_ && options.softcap == 0 && sizes.q_length == 1 && sizes.group <= kTileRows &&
                  (q.shape(1) == 1 || mask->strides(1) == 0),
      .ragged = starts || ends,
      .copyable = is_hopper() && copyable(k) && copyable(v),
      .shared_values = same_rows(k, v),
  };
}

class Decode final : public AttentionPrimitive {
 public:
  using AttentionPrimitive::AttentionPrimitive;

  const char* name() const override {
    return state_.given[0] ? "PagedAttention" : "DecodeAttention";
  }

  std::pair<AttentionArrays, AttentionOptions> call(const Arrays& inputs) const {
    return {arrays(inputs), options()};
  }

 protected:
  Arrays compose(const Arrays& inputs) const override {
    AttentionArrays in = arrays(inputs);
    if (in.table) {
      in.k = pages_in_order(in.k, *in.table, *in.ends, queue());
      in.v = pages_in_order(in.v, *in.table, *in.ends, queue());
    }
    return composed_attention(in, options(), queue());
  }

  void encode(const Arrays& inputs, Arrays& outputs, CommandEncoder& encoder) override {
    const AttentionArrays in = readable(inputs, encoder);
    allocate_like_queries(outputs[0], in.q, stream());
    if (options().lse) {
      allocate(outputs[1], stream());
    }
    const DecodeProblem problem = problem_of(in, options());
    const DecodePlan plan = plan_decode(problem);
    DecodeParams params = decode_params(problem, plan, options());
    allocate_partials(params, plan, encoder, stream());

    const std::vector<const mx::array*> updated = updated_pages(inputs, in, outputs);
    KernelNode node(encoder);
    set_arrays(params, in, outputs, node);
    for (const mx::array* pages : updated) {
      encoder.set_output_array(*pages);
    }
    take_lane(encoder);
    launch(plan, params, in, node);
    if (plan.merge == Merge::kernel) {
      for (mx::array& output : outputs) {
        node.reads(output);
        node.writes(output);
      }
      CUfunction kernel = with_pdl(merge_kernel(problem.dtype));
      node.launch(kernel, dim3(in.q.size() / in.q.shape(3)), merge_threads(plan, params.value_dim), 0, params);
    }
    for (const mx::array* pages : updated) {
      hold_apart(*pages);
    }
  }

 private:
  // The inputs that the stream's next update may write to (paged/primitive.h): pages that are read without a copy. The inputs of
  // a traced graph are used again.
  std::vector<const mx::array*> updated_pages(const Arrays& inputs, const AttentionArrays& in, const Arrays& outputs) {
    std::vector<const mx::array*> updated;
    if (!in.table || std::any_of(outputs.begin(), outputs.end(), [](const mx::array& out) { return out.is_tracer(); })) {
      return updated;
    }
    for (const auto& [input, read] : {std::pair(&inputs[1], &in.k), std::pair(&inputs[2], &in.v)}) {
      if (input->id() == read->id() && updated_on(*input, stream())) {
        updated.push_back(input);
      }
    }
    return updated;
  }

  // As the kernels read them.
  AttentionArrays readable(const Arrays& inputs, CommandEncoder& encoder) {
    AttentionArrays in = arrays(inputs);
    make_readable(in, encoder, stream());
    in.k = with_readable_rows(in.k, encoder, stream());
    in.v = with_readable_rows(in.v, encoder, stream());
    return in;
  }

  static void launch(const DecodePlan& plan, const DecodeParams& params, const AttentionArrays& in, KernelNode& node) {
    CUfunction loaded = module_of(plan.engine).function(plan.kernel);
    CUfunction kernel = plan.engine == DecodeEngine::wide ? loaded : with_pdl(loaded);
    auto add = [&](const auto&... maps) {
      node.launch(kernel, plan.grid, plan.warps * 32, static_cast<unsigned>(plan.shared_bytes), params, maps...);
    };
    if (plan.engine == DecodeEngine::sm90) {
      add(tensor_map(in.k, Sm90Traits::kTileKeys), tensor_map(in.v, Sm90Traits::kTileKeys));
    } else {
      add();
    }
  }
};

}  // namespace

Arrays decode_attention(const AttentionArrays& in, const AttentionOptions& options, const mx::Stream& stream) {
  return attention_by<Decode>(in, options, stream);
}

std::optional<std::pair<AttentionArrays, AttentionOptions>> decode_call(const mx::array& out) {
  const auto* decode = out.has_primitive() ? dynamic_cast<const Decode*>(&out.primitive()) : nullptr;
  auto call = decode ? std::optional(decode->call(out.inputs())) : std::nullopt;
  return call && !call->first.table ? call : std::nullopt;
}

std::string decode_kernel(const AttentionArrays& given, const AttentionOptions& options) {
  AttentionArrays in = given;
  for (auto* array : {&in.q, &in.k, &in.v}) {
    if (!rows_readable(*array)) {  // the kernel is given a copy
      *array = mx::array(array->shape(), array->dtype(), nullptr, {});
    }
  }
  const DecodePlan plan = plan_decode(problem_of(in, options));
  return std::string(source_of(plan.engine)) + " " + plan.kernel;
}

}  // namespace mlx_cuda
