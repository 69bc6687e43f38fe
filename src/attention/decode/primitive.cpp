#include "attention/decode/primitive.h"

#include "attention/composed.h"
#include "attention/decode/params.h"
#include "attention/decode/plans.h"
#include "attention/decode/traits.h"
#include "attention/paged/primitive.h"
#include "attention/primitive.h"
#include "device/numbers.cuh"
#include "runtime/early.h"
#include "runtime/lanes.h"
#include "runtime/memory.h"
#include "runtime/node.h"
#include "runtime/tensor_map.h"

#include <mlx/backend/cuda/utils.h>
#include <mlx/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

namespace mlx_cuda {

namespace {

DecodeStrides strides_of(const mx::array& in) {
  return {in.strides(0), in.strides(1), in.strides(2)};
}

// Whether values are the first columns of keys. What has not been computed yet shares nothing.
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

// All but what depends on where arrays lie.
DecodeParams params_of(const DecodeProblem& problem, const DecodePlan& plan, const AttentionOptions& options) {
  DecodeParams params{};
  static_cast<DecodeSizes&>(params) = problem.sizes;
  static_cast<DecodeTiling&>(params) = plan.tiling;
  params.stream_k = plan.stream_k;
  params.split_k = plan.split_k;
  params.merge_groups = plan.merge_groups;
  params.stages = plan.stages;
  params.softcap = options.softcap;
  params.scale = options.softcap > 0 ? options.scale / options.softcap : options.scale * kLog2e;
  params.plain = !problem.mask && options.softcap == 0 && options.scale > 0;
  return params;
}

// Names inputs and outputs of the kernel, and says where they are.
void set_arrays(DecodeParams& params, const AttentionArrays& in, std::vector<mx::array>& outputs, KernelNode& node) {
  params.q = node.reads(in.q);
  params.k = node.reads(in.k);
  params.v = node.reads(in.v);
  params.mask = node.reads(in.mask);
  params.starts = node.reads<int>(in.starts);
  params.ends = node.reads<int>(in.ends);
  params.sinks = node.reads(in.sinks);
  params.table = node.reads<int>(in.table);
  params.out = node.writes(outputs[0]);
  params.lse = outputs.size() > 1 ? node.writes<float>(outputs[1]) : nullptr;
  params.q_strides = strides_of(in.q);
  params.k_strides = strides_of(in.k);
  params.v_strides = strides_of(in.v);
  params.out_strides = strides_of(outputs[0]);
  if (in.mask) {
    params.mask_is_bool = in.mask->dtype() == mx::bool_;
    std::copy_n(in.mask->strides().begin(), 4, params.mask_strides);
  }
  params.table_stride = in.table ? in.table->strides(0) : 0;
  params.page_size = in.k.shape(2);
}

// A number that no other call of this process has, of 48 bits. The first is random, so that memory does not hold it by chance.
std::uint64_t call_number() {
  static std::atomic<std::uint64_t> next = [] {
    std::random_device source;
    return std::uint64_t{source()} << 32 | source();
  }();
  return next++ & ((std::uint64_t{1} << 48) - 1);
}

class Decode final : public AttentionPrimitive {
 public:
  using AttentionPrimitive::AttentionPrimitive;

  const char* name() const override {
    return state_.given[0] ? "PagedAttention" : "DecodeAttention";
  }

  std::pair<AttentionArrays, AttentionOptions> call(const std::vector<mx::array>& inputs) const {
    return {arrays(inputs), options()};
  }

 protected:
  std::vector<mx::array> compose(const std::vector<mx::array>& inputs) const override {
    AttentionArrays in = arrays(inputs);
    if (in.table) {
      in.k = in_order(in.k, *in.table, *in.ends);
      in.v = in_order(in.v, *in.table, *in.ends);
    }
    return composed_attention(in, options(), queue());
  }

  void encode(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs, mx::cu::CommandEncoder& encoder) override {
    const AttentionArrays in = readable(inputs, encoder);
    allocate_like_queries(outputs[0], in.q, stream());
    if (options().lse) {
      allocate(outputs[1], stream());
    }
    const DecodeProblem problem = problem_of(in, options());
    const DecodePlan plan = plan_decode(problem);
    DecodeParams params = params_of(problem, plan, options());
    if (plan.merge != Merge::none) {
      allocate_partials(params, plan, encoder);
    }

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
      CUfunction kernel = merge_kernel(problem.dtype);
      begins_early(kernel);
      node.launch(kernel, dim3(in.q.size() / in.q.shape(3)), merge_threads(plan, params.value_dim), 0, params);
    }
    for (const mx::array* pages : updated) {
      hold_apart(const_cast<mx::array&>(*pages));  // MLX has no other use for the inputs of a node that is encoded
    }
  }

 private:
  // Those inputs that the stream's next update may write to (paged/primitive.h): pages that are read where they lie. The inputs of
  // a traced graph are used again.
  std::vector<const mx::array*> updated_pages(
      const std::vector<mx::array>& inputs, const AttentionArrays& in, const std::vector<mx::array>& outputs) {
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

  // As the kernels read them: rows 16 bytes at a time, vectors one element after another; the mask may be anything.
  AttentionArrays readable(const std::vector<mx::array>& inputs, mx::cu::CommandEncoder& encoder) {
    AttentionArrays in = arrays(inputs);
    for (auto* array : {&in.q, &in.k, &in.v}) {
      *array = with_readable_rows(*array, encoder, stream());
    }
    for (auto* array : {&in.table, &in.starts, &in.ends, &in.sinks}) {
      if (*array) {
        *array = with_adjacent_elements(**array, encoder, stream());
      }
    }
    return in;
  }

  void allocate_partials(DecodeParams& params, const DecodePlan& plan, mx::cu::CommandEncoder& encoder) {
    const std::size_t results = (plan.partial_rows * (params.value_dim + 2) * sizeof(float) + 15) / 16 * 16;
    auto* memory = static_cast<char*>(workspace(results + plan.tickets * sizeof(std::uint64_t), encoder, stream()));
    params.partial_values = reinterpret_cast<float*>(memory);
    params.partial_scales = params.partial_values + plan.partial_rows * params.value_dim;
    params.tickets = reinterpret_cast<unsigned long long*>(memory + results);
    params.call = call_number();
  }

  static void launch(const DecodePlan& plan, const DecodeParams& params, const AttentionArrays& in, KernelNode& node) {
    CUfunction kernel = module_of(plan.engine).function(plan.kernel);
    if (plan.engine != DecodeEngine::wide) {
      begins_early(kernel);
    }
    auto add = [&](const auto&... maps) {
      node.launch(kernel, plan.grid, plan.warps * 32, static_cast<unsigned>(plan.shared_bytes), params, maps...);
    };
    if (plan.engine == DecodeEngine::sm90) {
      add(tensor_map(in.k, Sm90Traits::kTileKeys), tensor_map(in.v, Sm90Traits::kTileKeys));
    } else {
      add();
    }
  }

  // The keys that there are, one after another as [B, Hkv, n * page_size, D], and zeros.
  mx::array in_order(const mx::array& pages, const mx::array& table, const mx::array& ends) const {
    const mx::Stream on = queue();
    const int batch = table.shape(0);
    const int keys = table.shape(1) * pages.shape(2);
    const mx::array page = mx::clip(table, mx::array(0), mx::array(pages.shape(0) - 1), on);
    mx::array all = mx::transpose(mx::take(pages, page, 0, on), {0, 2, 1, 3, 4}, on);
    all = mx::reshape(all, {batch, pages.shape(1), keys, pages.shape(3)}, on);
    const mx::array place = mx::reshape(mx::arange(keys, mx::int32, on), {1, 1, keys, 1}, on);
    const mx::array there = mx::less(place, mx::reshape(ends, {batch, 1, 1, 1}, on), on);
    return mx::where(there, all, mx::array(0.0f, all.dtype()), on);
  }
};

}  // namespace

std::vector<mx::array> decode_attention(const AttentionArrays& in, const AttentionOptions& options, const mx::Stream& stream) {
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
