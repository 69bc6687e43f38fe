#include "attention/decode/primitive.h"

#include "attention/decode/params.h"
#include "attention/decode/plans.h"
#include "attention/decode/traits.h"
#include "device/numbers.cuh"
#include "runtime/lanes.h"
#include "runtime/memory.h"
#include "runtime/tensor_map.h"

#include <mlx/backend/cuda/utils.h>
#include <mlx/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <random>
#include <string>
#include <tuple>

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

// The inputs of the primitive.
struct DecodeArrays {
  mx::array q;
  mx::array k;
  mx::array v;
  std::optional<mx::array> table;
  AttentionExtras extras;
};

DecodeProblem problem_of(const DecodeArrays& in, const AttentionOptions& options) {
  const auto& [q, k, v, table, extras] = in;
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
  const auto& mask = extras.mask;
  return {
      .dtype = q.dtype(),
      .sizes = sizes,
      .paged = table.has_value(),
      .mask = mask.has_value(),
      .key_mask = mask && mask->dtype() == mx::bool_ && options.softcap == 0 && sizes.q_length == 1 && sizes.group <= kTileRows &&
                  (q.shape(1) == 1 || mask->strides(1) == 0),
      .ragged = extras.starts || extras.ends,
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

void set_arrays(DecodeParams& params, const DecodeArrays& in, std::vector<mx::array>& outputs) {
  const auto& [q, k, v, table, extras] = in;
  auto numbers = [](const std::optional<mx::array>& array) { return array ? mx::gpu_ptr<int>(*array) : nullptr; };
  params.q = mx::gpu_ptr<void>(q);
  params.k = mx::gpu_ptr<void>(k);
  params.v = mx::gpu_ptr<void>(v);
  params.out = mx::gpu_ptr<void>(outputs[0]);
  params.lse = outputs.size() > 1 ? mx::gpu_ptr<float>(outputs[1]) : nullptr;
  params.q_strides = strides_of(q);
  params.k_strides = strides_of(k);
  params.v_strides = strides_of(v);
  params.out_strides = strides_of(outputs[0]);
  if (extras.mask) {
    params.mask = mx::gpu_ptr<void>(*extras.mask);
    params.mask_is_bool = extras.mask->dtype() == mx::bool_;
    std::copy_n(extras.mask->strides().begin(), 4, params.mask_strides);
  }
  params.starts = numbers(extras.starts);
  params.ends = numbers(extras.ends);
  params.sinks = extras.sinks ? mx::gpu_ptr<void>(*extras.sinks) : nullptr;
  params.table = numbers(table);
  params.table_stride = table ? table->strides(0) : 0;
  params.page_size = k.shape(2);
}

// A number that no other call of this process has, of 48 bits. The first is random, so that memory does not hold it by chance.
std::uint64_t call_number() {
  static std::atomic<std::uint64_t> next = [] {
    std::random_device source;
    return std::uint64_t{source()} << 32 | source();
  }();
  return next++ & ((std::uint64_t{1} << 48) - 1);
}

class Decode final : public Fused {
 public:
  Decode(const mx::Stream& stream, const AttentionOptions& options, const AttentionExtras& extras, bool with_lse, bool paged)
      : Fused(stream),
        options_(options),
        mask_(extras.mask.has_value()),
        starts_(extras.starts.has_value()),
        ends_(extras.ends.has_value()),
        sinks_(extras.sinks.has_value()),
        with_lse_(with_lse),
        paged_(paged) {}

  const char* name() const override {
    return paged_ ? "PagedAttention" : "DecodeAttention";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& that = static_cast<const Decode&>(other);
    auto all = [](const Decode& d) {
      const auto& o = d.options_;
      return std::tuple(
          o.scale, o.softcap, o.window_left, o.window_right, d.mask_, d.starts_, d.ends_, d.sinks_, d.with_lse_, d.paged_);
    };
    return all(*this) == all(that);
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    const auto& q = inputs[0].shape();
    std::vector<mx::Shape> shapes{{q[0], q[1], q[2], inputs[2].shape(3)}};
    if (with_lse_) {
      shapes.push_back({q[0], q[1], q[2]});
    }
    return shapes;
  }

 protected:
  std::vector<mx::array> compose(const std::vector<mx::array>& inputs) const override {
    const DecodeArrays in = arrays(inputs);
    auto keys = [&](const mx::array& array) { return paged_ ? in_order(array, *in.table, *in.extras.ends) : array; };
    auto results = composed_attention_and_lse(in.q, keys(in.k), keys(in.v), in.extras, options_, queue());
    results.resize(with_lse_ ? 2 : 1, results[0]);
    return results;
  }

  void encode(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs, mx::cu::CommandEncoder& encoder) override {
    const DecodeArrays in = readable(inputs, encoder);
    allocate_outputs(in.q, outputs);
    const DecodeProblem problem = problem_of(in, options_);
    const DecodePlan plan = plan_decode(problem);
    DecodeParams params = params_of(problem, plan, options_);
    if (plan.merge != Merge::none) {
      allocate_partials(params, plan, encoder);
    }

    for (const mx::array* array : {&in.q, &in.k, &in.v}) {
      encoder.set_input_array(*array);
    }
    for (const auto* extra : {&in.table, &in.extras.mask, &in.extras.starts, &in.extras.ends, &in.extras.sinks}) {
      if (*extra) {
        encoder.set_input_array(**extra);
      }
    }
    name_outputs(outputs, encoder);
    take_lane(encoder);
    set_arrays(params, in, outputs);
    launch(plan, params, in, encoder);
    if (plan.merge == Merge::kernel) {
      for (const mx::array& output : outputs) {
        encoder.set_input_array(output);
      }
      name_outputs(outputs, encoder);
      encoder.add_kernel_node_ex(
          merge_kernel(problem.dtype), dim3(in.q.size() / in.q.shape(3)), dim3(merge_threads(plan, params.value_dim)), dim3(), 0,
          params);
    }
  }

 private:
  DecodeArrays arrays(const std::vector<mx::array>& inputs) const {
    std::size_t next = 3;
    auto take = [&](bool there) { return there ? std::optional(inputs[next++]) : std::nullopt; };
    DecodeArrays in{inputs[0], inputs[1], inputs[2], take(paged_), {}};
    in.extras.mask = take(mask_);
    in.extras.starts = take(starts_);
    in.extras.ends = take(ends_);
    in.extras.sinks = take(sinks_);
    return in;
  }

  // As the kernels read them: rows 16 bytes at a time, vectors one element after another; the mask may be anything.
  DecodeArrays readable(const std::vector<mx::array>& inputs, mx::cu::CommandEncoder& encoder) {
    DecodeArrays in = arrays(inputs);
    for (auto* array : {&in.q, &in.k, &in.v}) {
      if (!rows_readable(*array)) {
        *array = contiguous_copy(*array, encoder, stream());
      }
    }
    for (auto* array : {&in.table, &in.extras.starts, &in.extras.ends, &in.extras.sinks}) {
      if (*array && (*array)->strides(-1) != 1 && (*array)->shape(-1) != 1) {
        *array = contiguous_copy(**array, encoder, stream());
      }
    }
    return in;
  }

  void allocate_outputs(const mx::array& q, std::vector<mx::array>& outputs) {
    mx::array& out = outputs[0];
    const std::int64_t heads = q.shape(1);
    const std::int64_t queries = q.shape(2);
    const std::int64_t value_dim = out.shape(3);
    if (queries > 1 && heads > 1 && q.strides(1) == q.shape(3) && q.strides(2) == heads * q.shape(3)) {
      // Rows first, as projections leave q: the next reshape needs no copy then.
      allocate(out, {queries * heads * value_dim, value_dim, heads * value_dim, 1}, stream());
    } else {
      allocate(out, stream());
    }
    if (with_lse_) {
      allocate(outputs[1], stream());
    }
  }

  void allocate_partials(DecodeParams& params, const DecodePlan& plan, mx::cu::CommandEncoder& encoder) {
    const std::size_t results = (plan.partial_rows * (params.value_dim + 2) * sizeof(float) + 15) / 16 * 16;
    auto* memory = static_cast<char*>(workspace(results + plan.tickets * sizeof(std::uint64_t), encoder, stream()));
    params.partial_values = reinterpret_cast<float*>(memory);
    params.partial_scales = params.partial_values + plan.partial_rows * params.value_dim;
    params.tickets = reinterpret_cast<unsigned long long*>(memory + results);
    params.call = call_number();
  }

  static void name_outputs(const std::vector<mx::array>& outputs, mx::cu::CommandEncoder& encoder) {
    for (const mx::array& output : outputs) {
      encoder.set_output_array(output);
    }
  }

  static void launch(const DecodePlan& plan, DecodeParams& params, const DecodeArrays& in, mx::cu::CommandEncoder& encoder) {
    auto add = [&](auto&... maps) {
      encoder.add_kernel_node_ex(
          module_of(plan.engine).function(plan.kernel), plan.grid, dim3(plan.warps * 32), dim3(),
          static_cast<unsigned>(plan.shared_bytes), params, maps...);
    };
    if (plan.engine == DecodeEngine::sm90) {
      CUtensorMap k_map = tensor_map(in.k, Sm90Traits::kTileKeys);
      CUtensorMap v_map = tensor_map(in.v, Sm90Traits::kTileKeys);
      add(k_map, v_map);
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

  AttentionOptions options_;
  bool mask_;
  bool starts_;
  bool ends_;
  bool sinks_;
  bool with_lse_;
  bool paged_;
};

}  // namespace

std::vector<mx::array> decode_attention(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    const AttentionExtras& extras,
    const AttentionOptions& options,
    bool with_lse,
    const mx::Stream& stream,
    const std::optional<mx::array>& table) {
  std::vector<mx::array> inputs{q, k, v};
  for (const auto* extra : {&table, &extras.mask, &extras.starts, &extras.ends, &extras.sinks}) {
    if (*extra) {
      inputs.push_back(**extra);
    }
  }
  auto primitive = std::make_shared<Decode>(stream, options, extras, with_lse, table.has_value());
  std::vector<mx::Shape> shapes = primitive->output_shapes(inputs);
  if (!with_lse) {
    return {mx::array(std::move(shapes[0]), q.dtype(), std::move(primitive), std::move(inputs))};
  }
  return mx::array::make_arrays(std::move(shapes), {q.dtype(), mx::float32}, primitive, inputs);
}

std::string decode_kernel(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    const AttentionExtras& extras,
    const AttentionOptions& options,
    const std::optional<mx::array>& table) {
  DecodeArrays in{q, k, v, table, extras};
  for (auto* array : {&in.q, &in.k, &in.v}) {
    if (!rows_readable(*array)) {  // the kernel is given a copy
      *array = mx::array(array->shape(), array->dtype(), nullptr, {});
    }
  }
  const DecodePlan plan = plan_decode(problem_of(in, options));
  return std::string(source_of(plan.engine)) + " " + plan.kernel;
}

}  // namespace mlx_cuda
