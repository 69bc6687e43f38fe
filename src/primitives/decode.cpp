#include "primitives/decode.h"

#include "kernels/decode.h"
#include "runtime/kernels.h"
#include "runtime/memory.h"
#include "runtime/status.h"

#include <mlx/backend/cuda/utils.h>
#include <mlx/ops.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>

// Defined in the sources that the build generates from kernels/decode.cu, kernels/direct.cu and kernels/wide.cu.
extern const std::uint64_t mlx_cuda_fatbin_decode[];
extern const std::uint64_t mlx_cuda_fatbin_direct[];
extern const std::uint64_t mlx_cuda_fatbin_wide[];

namespace mlx_cuda {

namespace {

constexpr float kLog2e = 1.4426950408889634f;
constexpr int kTileRows = 16;
constexpr int kFewestKeys = 128;  // of one worker: fewer do not pay for merging
constexpr int kWidestNarrow = 256;
constexpr int kWidestDirect = 128;
constexpr int kFewestSplitKeys = 256;   // of one part in the direct kernel
constexpr int kUnsplitKeys = 512;       // up to which one part is as fast, and needs no second kernel
constexpr int kMostMaskedKeys = 32768;  // of one part with a mask, whose bits lie in shared memory
constexpr int kShortSpan = 2048 + 15;
constexpr int kReservedShared = 1024;  // bytes that the driver takes of a multiprocessor's shared memory for each block

KernelModule& kernels() {
  static KernelModule module(mlx_cuda_fatbin_decode);
  return module;
}

KernelModule& direct_kernels() {
  static KernelModule module(mlx_cuda_fatbin_direct);
  return module;
}

KernelModule& wide_kernels() {
  static KernelModule module(mlx_cuda_fatbin_wide);
  return module;
}

int rounded_up(int value, int unit) {
  return (value + unit - 1) / unit * unit;
}

// How a kernel is launched, and what it has to be told of that.
struct Plan {
  std::string kernel;  // without the dtype
  int warps = 0;
  int shared = 0;  // bytes
  int blocks = 0;  // that fit on one multiprocessor
};

// The keys that a query may see, and how far the first tile may begin before them.
int longest_span(const DecodeParams& params) {
  const int keys = params.window_left >= 0 ? std::min(params.kv_length, params.window_left + params.q_length) : params.kv_length;
  return keys + kTileRows - 1;
}

// Whether each unit is better cut into parts of its own: there are too few tiles to share them all out evenly, or a mask says where
// they are.
bool is_direct(const DecodeParams& params, bool mask) {
  const std::int64_t units = std::int64_t{params.batch} * params.kv_heads;
  const bool takes = !params.table && params.head_dim == params.value_dim && params.head_dim <= kWidestDirect &&
                     params.group * params.q_length <= kTileRows;
  return takes && (mask || units < 2 * multiprocessors() || longest_span(params) <= kShortSpan);
}

// One wave of blocks; several where lengths differ, so that short rows do not leave multiprocessors idle for long.
Plan plan_direct(DecodeParams& params, bool uneven, bool masked) {
  const int width = params.head_dim <= 64 ? 64 : 128;
  params.tile_shift = 4;
  const std::int64_t units = std::int64_t{params.batch} * params.kv_heads;
  const std::int64_t blocks = std::int64_t{multiprocessors()} * (width == 64 ? 2 : 1);
  const int span = longest_span(params);
  const std::int64_t most = span <= kUnsplitKeys ? 1 : (span + kFewestSplitKeys - 1) / kFewestSplitKeys;
  const std::int64_t least = masked ? (span + kMostMaskedKeys - 1) / kMostMaskedKeys : 1;
  const auto wanted = static_cast<int>(std::max(std::clamp<std::int64_t>(blocks * (uneven ? 4 : 1) / units, 1, most), least));
  params.chunk = rounded_up((span + wanted - 1) / wanted, 64);
  params.splits = (span + params.chunk - 1) / params.chunk;

  const int bits = masked ? params.chunk / kTileRows * static_cast<int>(sizeof(unsigned)) : 0;
  const int held = rounded_up(params.group * params.q_length, 8);
  const int limit = shared_memory_limit() - bits;
  Plan plan{.kernel = std::to_string(width) + (masked ? "_masked" : "")};
  // Of many short blocks, two of half the size hide one another's beginning and end.
  plan.warps = params.splits == 1 && units >= 2 * blocks && span <= kShortSpan ? 4 : 8;
  auto results = [&] { return plan.warps * held * (width + 6) * static_cast<int>(sizeof(float)); };
  while (plan.warps > 1 && results() > limit) {
    plan.warps /= 2;
  }
  plan.shared = std::max(results(), kTileRows * width * 2) + bits;
  return plan;
}

// The rows of one kv head, in as many equal blocks as needed.
void split_rows(DecodeParams& params, int rows, int most) {
  params.row_blocks = (rows + most - 1) / most;
  params.block_rows = rounded_up((rows + params.row_blocks - 1) / params.row_blocks, kTileRows);
}

// The same numbers as in kernels/decode.cu.
Plan plan_narrow(DecodeParams& params, bool masked) {
  constexpr int stages = 3;
  const int widest = std::max(params.head_dim, params.value_dim);
  const int width = widest <= 64 ? 64 : widest <= 128 ? 128 : 256;
  const int rows = params.group * params.q_length;
  const bool solo = rows <= kTileRows;
  const int team_warps = width == 64 ? 16 : width == 128 ? 12 : 8;
  split_rows(params, rows, solo ? kTileRows : width == 256 ? 64 : 128);
  params.row_warps = params.block_rows / kTileRows;
  params.tile_shift = 4;

  const int queries = width <= 128 ? 0 : params.block_rows * width * 2;  // otherwise in registers
  const int held = solo ? rounded_up(rows, 8) : params.block_rows;
  const int limit = shared_memory_limit();
  const int on_multiprocessor = device_attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR);
  // Two blocks of few warps hide one another's beginning and end.
  Plan plan{.kernel = std::to_string(width) + (solo ? "" : "_rows") + (params.table ? "_paged" : masked ? "_masked" : "")};
  for (int slices = std::max((solo ? 512 / width : team_warps) / params.row_warps, 1); slices >= 1; --slices) {
    const int ring = slices * stages * width * 64;
    const int results = slices * held * (width + 6) * static_cast<int>(sizeof(float));
    plan.warps = slices * params.row_warps;
    plan.shared = queries + std::max(ring, results);
    plan.blocks = std::clamp(on_multiprocessor / (plan.shared + kReservedShared), 1, solo ? 2 : 1);
    if (plan.shared <= limit) {
      return plan;
    }
  }
  throw std::runtime_error("[attention] The results of one block do not fit into shared memory.");
}

// The same numbers as in kernels/wide.cu.
Plan plan_wide(DecodeParams& params) {
  constexpr int warps = 8;
  constexpr int most_stages = 3;
  constexpr int loads = 18;  // of 32 elements, in the widest row
  const int rows = params.group * params.q_length;
  const int limit = shared_memory_limit();
  params.tile_shift = params.shared_values ? 6 : 5;
  params.row_warps = 1;
  const int tile = 1 << params.tile_shift;
  const int key_bytes = (params.head_dim <= 512 ? 512 : 576) * 2;
  const int stage = tile * (key_bytes + (params.shared_values ? 0 : rounded_up(params.value_dim, 64) * 2));
  for (int row_tiles = rows <= 16 ? 1 : rows <= 32 ? 2 : 4; row_tiles >= 1; row_tiles /= 2) {
    const int held_loads = row_tiles == 1 ? 14 : row_tiles == 2 ? 8 : 0;  // in registers
    const int weights = tile / 16 * 512;
    const int peaks = (tile / 8 + 1) * 64;
    const int fixed = row_tiles * (weights + peaks + (loads - held_loads) * 1024);
    for (params.stages = most_stages; params.stages >= 2; --params.stages) {
      if (const int shared = fixed + params.stages * stage; shared <= limit) {
        params.block_rows = row_tiles * kTileRows;
        params.row_blocks = (rows + params.block_rows - 1) / params.block_rows;
        const std::string kind = std::string(params.shared_values ? "_shared" : "") + (params.table ? "_paged" : "");
        return {std::to_string(params.block_rows) + kind, warps, shared, 1};
      }
    }
  }
  throw std::runtime_error("[attention] Heads this wide need more shared memory than this GPU has.");
}

// The tiles of a unit, or the most that it may have where starts or ends make them differ.
std::int64_t most_tiles(const DecodeParams& params) {
  int first = 0;
  if (params.window_left >= 0) {
    first = std::max(params.kv_length - params.q_length - params.window_left, 0);
  }
  const int last = (params.kv_length + params.tile_keys - 1) >> params.tile_shift;
  return last - (first >> params.tile_shift);
}

// Shares the tiles of all units out among as many blocks as the GPU holds.
void share(DecodeParams& params, const Plan& plan, bool ragged) {
  const std::int64_t units = std::int64_t{params.batch} * params.kv_heads * params.row_blocks;
  const std::int64_t tiles = most_tiles(params);
  params.fewest_tiles = static_cast<int>(std::min<std::int64_t>(kFewestKeys >> params.tile_shift, tiles));
  params.workers = static_cast<int>(std::min(std::int64_t{multiprocessors()} * plan.blocks, units * tiles / params.fewest_tiles));
  if (!ragged) {
    params.unit_tiles = static_cast<int>(tiles);
    params.quota = static_cast<unsigned>(units * tiles / params.workers);
    params.extra = static_cast<unsigned>(units * tiles % params.workers);
  }
  const auto parts = static_cast<int>(params.workers / units + 1);
  params.merge_groups = parts <= 6 ? 1 : std::min(parts / 4, 8);
}

// Rows of incomplete results that there may be.
std::size_t slots_of(const DecodeParams& params, bool ragged) {
  if (params.splits > 0) {
    const std::size_t rows = static_cast<std::size_t>(params.batch) * params.kv_heads * params.group * params.q_length;
    return params.splits > 1 ? params.splits * rows : 0;
  }
  const std::int64_t units = std::int64_t{params.batch} * params.kv_heads * params.row_blocks;
  const bool merging = ragged || units % params.workers != 0;
  return merging ? 2 * static_cast<std::size_t>(params.workers) * params.block_rows : 0;
}

DecodeStrides strides_of(const mx::array& in) {
  return {in.strides(0), in.strides(1), in.strides(2)};
}

bool same_rows(const mx::array& k, const mx::array& v) {
  auto same = [&](int axis) { return k.shape(axis) == 1 || k.strides(axis) == v.strides(axis); };
  return mx::gpu_ptr<void>(k) == mx::gpu_ptr<void>(v) && same(0) && same(1) && same(2) && v.shape(3) <= k.shape(3);
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
    params.plain = !mask && options_.softcap == 0;
    params.shared_values = same_rows(k, v);
    if (table) {
      params.table = mx::gpu_ptr<int>(*table);
      params.table_stride = table->strides(0);
    }
    // One row of a bool mask for all heads: what it hides is not read.
    const bool masked = mask && mask->dtype() == mx::bool_ && options_.softcap == 0 && queries == 1 && params.group <= kTileRows &&
                        (heads == 1 || mask->strides(1) == 0);
    const bool wide = std::max(params.head_dim, value_dim) > kWidestNarrow;
    const bool ragged = starts || ends;
    const bool direct = is_direct(params, mask.has_value());
    const Plan plan = direct ? plan_direct(params, ragged || mask, masked) : wide ? plan_wide(params) : plan_narrow(params, masked);
    params.tile_keys = 1 << params.tile_shift;
    if (!direct) {
      share(params, plan, ragged);
    }
    const std::size_t slots = slots_of(params, ragged);
    if (slots > 0) {
      params.partial = static_cast<float*>(workspace(slots * (value_dim + 2) * sizeof(float), encoder, stream()));
      params.partial_scale = params.partial + slots * value_dim;
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
    KernelModule& module = direct ? direct_kernels() : wide ? wide_kernels() : kernels();
    const std::string prefix = direct ? "direct_" : wide ? "wide_" : "decode_";
    const dim3 grid = direct ? dim3(params.splits, params.kv_heads, params.batch) : dim3(params.workers);
    encoder.add_kernel_node_ex(
        module.function(prefix + type + plan.kernel), grid, dim3(plan.warps * 32), dim3(), static_cast<unsigned>(plan.shared),
        params);
    if (slots > 0) {
      for (const mx::array& output : outputs) {
        encoder.set_input_array(output);
      }
      name_outputs();
      // A merging block has four columns in a lane, and takes turns where there is much to merge.
      const int threads = direct ? 32 : rounded_up(value_dim, 128) / 4 * params.merge_groups;
      encoder.add_kernel_node_ex(
          (direct ? direct_kernels() : kernels()).function((direct ? "direct_" : "decode_") + type + "merge"),
          dim3(params.batch * heads * queries), dim3(threads), dim3(), 0, params);
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
