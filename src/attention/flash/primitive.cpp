#include "attention/flash/primitive.h"

#include "attention/cudnn/forward.h"
#include "attention/flash/mask_tiles.h"
#include "attention/flash/params.h"
#include "attention/flash/plan_sm90.h"
#include "runtime/device_code.h"
#include "runtime/lanes.h"
#include "runtime/memory.h"
#include "runtime/status.h"
#include "runtime/tensor_map.h"

#include <mlx/backend/cuda/utils.h>
#include <mlx/ops.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>

namespace mlx_cuda {

namespace {

// One compiled kernel; the same numbers as at the end of attention/flash/flash.cu.
struct Variant {
  const char* name;
  int itemsize;
  bool general;  // takes masks and a softcap
  int head_dim;  // at most
  int v_head_dim;
  int keys;  // of a tile
  int warps;
  int row_tiles;  // of 16 rows, that a warp holds
  int parts;      // warps that share the rows
  int stages;

  constexpr int rows() const {
    return warps / parts * row_tiles * 16;
  }
  constexpr int shared() const {
    const int pitch = head_dim * itemsize + 16;
    const int value_pitch = v_head_dim * itemsize + 16;
    const int exchanged = parts > 1 ? rows() * (keys * 2 + 16) + parts * rows() * static_cast<int>(sizeof(float)) : 0;
    return rows() * pitch + stages * keys * (pitch + value_pitch) + exchanged;
  }
};

// For each size of the elements: first those that take neither a mask nor a softcap, then those that do; the narrowest first, and
// of the same width the fastest. The last of each fits into the shared memory of every GPU.
constexpr std::array<Variant, 21> kVariants{{
    {"64", 2, false, 64, 64, 64, 4, 2, 1, 2},           {"128", 2, false, 128, 128, 64, 4, 2, 1, 1},
    {"192_128", 2, false, 192, 128, 64, 4, 2, 1, 1},    {"192", 2, false, 192, 192, 128, 8, 1, 1, 1},
    {"256", 2, false, 256, 256, 128, 8, 1, 1, 1},       {"64_general", 2, true, 64, 64, 64, 4, 2, 1, 1},
    {"128_general", 2, true, 128, 128, 32, 4, 2, 1, 1}, {"192_128_general", 2, true, 192, 128, 32, 4, 2, 1, 2},
    {"192_general", 2, true, 192, 192, 64, 8, 1, 1, 1}, {"256_general", 2, true, 256, 256, 64, 8, 2, 2, 1},
    {"256_small", 2, true, 256, 256, 32, 4, 1, 1, 1},   {"576", 2, true, 576, 512, 64, 8, 2, 4, 1},
    {"576_medium", 2, true, 576, 512, 32, 8, 1, 2, 1},  {"576_small", 2, true, 576, 512, 32, 2, 1, 2, 1},
    {"64", 4, false, 64, 64, 64, 4, 2, 1, 1},           {"128", 4, false, 128, 128, 32, 4, 2, 1, 1},
    {"256", 4, false, 256, 256, 32, 8, 1, 1, 1},        {"64_general", 4, true, 64, 64, 64, 4, 2, 1, 1},
    {"128_general", 4, true, 128, 128, 32, 4, 2, 1, 1}, {"256_general", 4, true, 256, 256, 32, 8, 1, 1, 1},
    {"256_small", 4, true, 256, 256, 32, 2, 1, 1, 1},
}};

// Whether operands of these widths have a kernel on a GPU that gives a block 99 KiB of shared memory, the least since sm_80.
constexpr bool fits_everywhere(int itemsize, int head_dim, int v_head_dim) {
  return std::any_of(kVariants.begin(), kVariants.end(), [&](const Variant& variant) {
    return variant.itemsize == itemsize && variant.general && head_dim <= variant.head_dim && v_head_dim <= variant.v_head_dim &&
           variant.shared() <= 99 * 1024;
  });
}
static_assert(fits_everywhere(2, 576, 512) && fits_everywhere(4, 256, 256));

// Hopper's code has none for less shared memory than it gives a block.
static_assert(std::all_of(kVariants.begin(), kVariants.end(), [](const Variant& variant) {
  const std::string_view name = variant.name;
  return name.ends_with("_medium") || name.ends_with("_small") || variant.shared() <= 227 * 1024;
}));

const Variant& choose(int itemsize, bool general, int head_dim, int v_head_dim) {
  const int limit = shared_memory_limit();
  for (const Variant& variant : kVariants) {
    if (variant.itemsize == itemsize && (variant.general || !general) && head_dim <= variant.head_dim &&
        v_head_dim <= variant.v_head_dim && variant.shared() <= limit) {
      return variant;
    }
  }
  throw std::runtime_error("[attention] No flash kernel takes these head dimensions.");
}

KernelModule& kernels() {
  static KernelModule module("flash");
  return module;
}

// Heads whose blocks run together, the longest rows of all of them first: many, so that no long rows are left for the end, but no
// more than those whose keys and values the L2 cache holds or which several blocks read at the same time.
int heads_together(const FlashParams& p, int itemsize) {
  constexpr std::int64_t blocks_together = 8;
  const std::int64_t group = p.heads / p.kv_heads;
  const std::int64_t bytes = std::int64_t{p.kv_length} * (p.head_dim + p.v_head_dim) * itemsize;
  const std::int64_t cached = device_attribute(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE) / 2 / std::max<std::int64_t>(bytes, 1);
  const std::int64_t shared = multiprocessors() * 2 / blocks_together;
  return static_cast<int>(std::clamp<std::int64_t>(std::max(cached, shared) * group, 1, std::int64_t{p.batch} * p.heads));
}

// What is the same for both primitives: heads and rows of the operands are there, all else is to be filled in.
class FlashBase : public Fused {
 public:
  FlashBase(const mx::Stream& stream, const AttentionOptions& options, bool with_lse)
      : Fused(stream), options_(options), with_lse_(with_lse) {}

 protected:
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
      const std::vector<mx::array>& operands,
      std::optional<mx::array> mask,
      const std::vector<mx::array>& extra,
      std::vector<mx::array>& outputs,
      mx::cu::CommandEncoder& encoder) {
    const bool hopper = flash_sm90_takes(operands[0], operands[2]);
    auto operand = [&](const mx::array& in) {
      return (hopper ? copyable(in) : rows_readable(in)) ? in : contiguous_copy(in, encoder, stream());
    };
    const mx::array q = operand(operands[0]);
    const mx::array k = operand(operands[1]);
    const mx::array v = operand(operands[2]);
    mx::array& out = outputs[0];
    params.heads = q.shape(axes.head);
    params.kv_heads = k.shape(axes.head);
    params.head_dim = q.shape(-1);
    params.v_head_dim = v.shape(-1);
    params.scale = options_.scale;
    params.softcap = options_.softcap;
    // A window longer than everything is none, and cannot overflow.
    const int longest = params.q_length + params.kv_length;
    params.window_left = std::min(options_.window_left, longest);
    params.window_right = std::min(options_.window_right, longest);
    params.section = heads_together(params, static_cast<int>(q.itemsize()));

    // Projections leave q as a transposed [B, T, H, D]; the output follows it, so that the next reshape needs no copy.
    const std::int64_t heads = params.heads;
    const bool rows_first = axes.batch >= 0 && params.q_length > 1 && heads > 1 && q.strides(axes.head) == params.head_dim &&
                            q.strides(axes.row) == heads * params.head_dim;
    if (rows_first) {
      const std::int64_t dim = params.v_head_dim;
      allocate(out, {params.q_length * heads * dim, dim, heads * dim, 1}, stream());
    } else {
      allocate(out, stream());
    }
    if (with_lse_) {
      allocate(outputs[1], stream());
      params.lse = mx::gpu_ptr<float>(outputs[1]);
    }
    const bool general = mask || options_.softcap > 0;
    const Variant& variant = choose(static_cast<int>(q.itemsize()), general, params.head_dim, params.v_head_dim);
    const FlashTile tile = hopper ? flash_sm90_tile(params.head_dim, params.v_head_dim) : FlashTile{variant.rows(), variant.keys};
    std::vector<mx::array> named{q, k, v};
    named.insert(named.end(), extra.begin(), extra.end());
    if (mask) {
      const bool shifting = !params.sinks && !params.lse;  // both see a shift of a whole row
      mask = hopper ? flash_sm90_mask(params, *mask, encoder, stream()) : mask;
      const auto [found, memory] = summarize_mask(*mask, tile.rows, tile.keys, shifting, encoder, stream());
      params.mask = found;
      named.push_back(memory);
      named.push_back(*mask);
    }

    for (const mx::array& in : named) {
      encoder.set_input_array(in);
    }
    for (const mx::array& output : outputs) {
      encoder.set_output_array(output);
    }
    params.q = mx::gpu_ptr<void>(q);
    params.k = mx::gpu_ptr<void>(k);
    params.v = mx::gpu_ptr<void>(v);
    params.out = mx::gpu_ptr<void>(out);
    auto strides = [&](const mx::array& of) {
      return FlashStrides{axes.batch < 0 ? 0 : of.strides(axes.batch), of.strides(axes.head), of.strides(axes.row)};
    };
    take_lane(encoder);
    params.q_strides = strides(q);
    params.k_strides = strides(k);
    params.v_strides = strides(v);
    params.out_strides = strides(out);

    if (hopper) {
      encode_flash_sm90(params, q, k, v, mask, encoder);
      return;
    }
    const std::string type = q.dtype() == mx::float16 ? "float16_" : q.dtype() == mx::bfloat16 ? "bfloat16_" : "float32_";
    const int row_tiles = (params.q_length + variant.rows() - 1) / variant.rows();
    const auto blocks = static_cast<unsigned>(std::int64_t{row_tiles} * params.batch * params.heads);
    encoder.add_kernel_node_ex(
        kernels().function("flash_" + type + variant.name), dim3(blocks), dim3(variant.warps * 32), dim3(),
        static_cast<unsigned>(variant.shared()), params);
  }

  // A vector whose elements are adjacent.
  mx::array adjacent(const mx::array& in, mx::cu::CommandEncoder& encoder) {
    return in.shape(0) == 1 || in.strides(0) == 1 ? in : contiguous_copy(in, encoder, stream());
  }

  AttentionOptions options_;
  bool with_lse_;
};

class Flash final : public FlashBase {
 public:
  Flash(const mx::Stream& stream, const AttentionOptions& options, bool with_lse, bool mask, bool starts, bool ends, bool sinks)
      : FlashBase(stream, options, with_lse), mask_(mask), starts_(starts), ends_(ends), sinks_(sinks) {}

  const char* name() const override {
    return "FlashAttention";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& that = static_cast<const Flash&>(other);
    auto all = [](const Flash& f) {
      const auto& o = f.options_;
      return std::tuple(o.scale, o.softcap, o.window_left, o.window_right, f.with_lse_, f.mask_, f.starts_, f.ends_, f.sinks_);
    };
    return all(*this) == all(that);
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
    extras.mask = take(mask_);
    extras.starts = take(starts_);
    extras.ends = take(ends_);
    extras.sinks = take(sinks_);
    return extras;
  }

  bool mask_;
  bool starts_;
  bool ends_;
  bool sinks_;
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
    auto all = [](const FlashVarlen& f) {
      const auto& o = f.options_;
      return std::tuple(o.scale, o.softcap, o.window_left, o.window_right, f.with_lse_, f.max_q_, f.max_k_);
    };
    return all(*this) == all(that);
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

std::vector<mx::array> flash_attention(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    const AttentionExtras& extras,
    const AttentionOptions& options,
    bool with_lse,
    const mx::Stream& stream) {
  std::vector<mx::array> inputs{q, k, v};
  for (const auto* extra : {&extras.mask, &extras.starts, &extras.ends, &extras.sinks}) {
    if (*extra) {
      inputs.push_back(**extra);
    }
  }
  auto primitive = std::make_shared<Flash>(
      stream, options, with_lse, extras.mask.has_value(), extras.starts.has_value(), extras.ends.has_value(),
      extras.sinks.has_value());
  return make(std::move(primitive), with_lse, inputs);
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
