#include "attention/decode/primitive.h"

#include "attention/decode/params.h"
#include "attention/decode/plans.h"
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

constexpr float kLog2e = 1.4426950408889634f;
constexpr int kTileRows = 16;

DecodeStrides strides_of(const mx::array& in) {
  return {in.strides(0), in.strides(1), in.strides(2)};
}

bool same_rows(const mx::array& k, const mx::array& v) {
  auto same = [&](int axis) { return k.shape(axis) == 1 || k.strides(axis) == v.strides(axis); };
  return mx::gpu_ptr<void>(k) == mx::gpu_ptr<void>(v) && same(0) && same(1) && same(2) && v.shape(3) <= k.shape(3);
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
    const AttentionExtras extras = this->extras(inputs);
    auto keys = [&](const mx::array& in) { return paged_ ? in_order(in, inputs[3], *extras.ends) : in; };
    auto results = composed_attention_and_lse(inputs[0], keys(inputs[1]), keys(inputs[2]), extras, options_, queue());
    results.resize(with_lse_ ? 2 : 1, results[0]);
    return results;
  }

  void encode(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs, mx::cu::CommandEncoder& encoder) override {
    mx::array& out = outputs[0];
    auto operand = [&](const mx::array& in) { return rows_readable(in) ? in : contiguous_copy(in, encoder, stream()); };
    const mx::array q = operand(inputs[0]);
    const mx::array k = operand(inputs[1]);
    const mx::array v = operand(inputs[2]);
    auto [mask, starts, ends, sinks] = extras(inputs);
    std::optional<mx::array> table = paged_ ? std::optional(inputs[3]) : std::nullopt;
    for (auto* extra : {&starts, &ends, &sinks, &table}) {  // read one element after another
      if (*extra && (*extra)->strides(-1) != 1 && (*extra)->shape(-1) != 1) {
        *extra = contiguous_copy(**extra, encoder, stream());
      }
    }
    const int heads = q.shape(1);
    const int queries = q.shape(2);
    const int value_dim = v.shape(3);
    const bool rows_first =
        queries > 1 && heads > 1 && q.strides(1) == q.shape(3) && q.strides(2) == std::int64_t{heads} * q.shape(3);
    if (rows_first) {  // as projections leave q: the next reshape needs no copy then
      allocate(out, {std::int64_t{queries} * heads * value_dim, value_dim, std::int64_t{heads} * value_dim, 1}, stream());
    } else {
      allocate(out, stream());
    }
    if (with_lse_) {
      allocate(outputs[1], stream());
    }

    DecodeParams params{};
    params.batch = q.shape(0);
    params.kv_heads = k.shape(1);
    params.group = heads / params.kv_heads;
    params.q_length = queries;
    params.kv_length = table ? table->shape(1) * k.shape(2) : k.shape(2);
    params.page_size = k.shape(2);
    params.head_dim = q.shape(3);
    params.value_dim = value_dim;
    params.window_left = options_.window_left;
    params.window_right = options_.window_right;
    params.softcap = options_.softcap;
    params.scale = options_.softcap > 0 ? options_.scale / options_.softcap : options_.scale * kLog2e;
    params.plain = !mask && options_.softcap == 0 && options_.scale > 0;
    params.shared_values = same_rows(k, v);
    if (table) {
      params.table = mx::gpu_ptr<int>(*table);
      params.table_stride = table->strides(0);
    }
    // One row of a bool mask for all heads: what it hides is not read.
    const bool masked = mask && mask->dtype() == mx::bool_ && options_.softcap == 0 && queries == 1 && params.group <= kTileRows &&
                        (heads == 1 || mask->strides(1) == 0);
    const bool ragged = starts || ends;
    const DecodePlan plan =
        plan_decode(params, {mask.has_value(), masked, ragged, is_hopper() && !table && copyable(k) && copyable(v)});
    if (plan.slots > 0) {
      const std::size_t results = (plan.slots * (value_dim + 2) * sizeof(float) + 15) / 16 * 16;
      auto* memory = static_cast<char*>(workspace(results + plan.tickets * sizeof(std::uint64_t), encoder, stream()));
      params.partial = reinterpret_cast<float*>(memory);
      params.partial_scale = params.partial + plan.slots * value_dim;
      params.tickets = reinterpret_cast<unsigned long long*>(memory + results);
      params.call = call_number();
    }

    for (const mx::array& in : {q, k, v}) {
      encoder.set_input_array(in);
    }
    for (const auto* extra : {&mask, &starts, &ends, &sinks, &table}) {
      if (*extra) {
        encoder.set_input_array(**extra);
      }
    }
    auto name_outputs = [&] {
      for (const mx::array& output : outputs) {
        encoder.set_output_array(output);
      }
    };
    name_outputs();
    take_lane(encoder);
    params.q = mx::gpu_ptr<void>(q);
    params.k = mx::gpu_ptr<void>(k);
    params.v = mx::gpu_ptr<void>(v);
    params.out = mx::gpu_ptr<void>(out);
    params.lse = with_lse_ ? mx::gpu_ptr<float>(outputs[1]) : nullptr;
    params.q_strides = strides_of(q);
    params.k_strides = strides_of(k);
    params.v_strides = strides_of(v);
    params.out_strides = strides_of(out);
    if (mask) {
      params.mask = mx::gpu_ptr<void>(*mask);
      params.mask_is_bool = mask->dtype() == mx::bool_;
      std::copy_n(mask->strides().begin(), 4, params.mask_strides);
    }
    params.starts = starts ? mx::gpu_ptr<int>(*starts) : nullptr;
    params.ends = ends ? mx::gpu_ptr<int>(*ends) : nullptr;
    params.sinks = sinks ? mx::gpu_ptr<void>(*sinks) : nullptr;

    const std::string type = q.dtype() == mx::float16 ? "float16_" : "bfloat16_";
    auto add = [&](auto&... maps) {
      encoder.add_kernel_node_ex(
          plan.module->function(plan.family + type + plan.kernel), plan.grid, dim3(plan.warps * 32), dim3(),
          static_cast<unsigned>(plan.shared), params, maps...);
    };
    if (plan.maps > 0) {
      CUtensorMap k_map = tensor_map(k, plan.maps);
      CUtensorMap v_map = tensor_map(v, plan.maps);
      add(k_map, v_map);
    } else {
      add();
    }
    if (plan.slots > 0 && plan.tickets == 0) {
      for (const mx::array& output : outputs) {
        encoder.set_input_array(output);
      }
      name_outputs();
      encoder.add_kernel_node_ex(
          decode_merge(type), dim3(params.batch * heads * queries), dim3(decode_merge_threads(params)), dim3(), 0, params);
    }
  }

 private:
  AttentionExtras extras(const std::vector<mx::array>& inputs) const {
    std::size_t next = paged_ ? 4 : 3;
    auto take = [&](bool there) { return there ? std::optional(inputs[next++]) : std::nullopt; };
    AttentionExtras extras;
    extras.mask = take(mask_);
    extras.starts = take(starts_);
    extras.ends = take(ends_);
    extras.sinks = take(sinks_);
    return extras;
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

}  // namespace mlx_cuda
