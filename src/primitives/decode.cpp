#include "primitives/decode.h"

#include "kernels/decode.h"
#include "runtime/kernels.h"
#include "runtime/memory.h"
#include "runtime/status.h"

#include <mlx/backend/cuda/utils.h>
#include <mlx/ops.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <tuple>

// Defined in the source that the build generates from kernels/decode.cu.
extern const std::uint64_t mlx_cuda_fatbin_decode[];

namespace mlx_cuda {

namespace {

constexpr float kLog2e = 1.4426950408889634f;
constexpr int kTileRows = 16;
constexpr int kFewestKeys = 256;  // of one split: fewer do not pay for merging
constexpr int kMostKeys = 32768;  // of one split with a mask, whose bits lie in shared memory
constexpr int kMostWarps = 8;
constexpr int kShortSpan = 2048 + 15;

// One compiled kernel; the same numbers as at the end of kernels/decode.cu.
struct Variant {
  int head_dim;
  int row_tiles;  // a warp holds
  int parts;      // warps that share the columns of V
  int blocks;     // on one multiprocessor
};

Variant choose(int head_dim, int rows) {
  const int width = head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256;
  if (rows <= kTileRows) {
    return {width, 1, width == 256 ? 2 : 1, width == 64 ? 2 : 1};
  }
  return {width, 2, width == 256 ? 4 : 1, 1};
}

struct Shape {
  int warps;
  unsigned shared;  // bytes
};

// The most warps whose results fit into shared memory.
Shape block_shape(const Variant& variant, int rows, int most_warps, int reserved) {
  const int limit = shared_memory_limit() - reserved;
  const int row_warps = (rows + variant.row_tiles * kTileRows - 1) / (variant.row_tiles * kTileRows);
  const int held = std::min(row_warps * variant.row_tiles * kTileRows, (rows + 7) / 8 * 8);
  const int queries = row_warps * variant.row_tiles * kTileRows * variant.head_dim * 2;
  for (int slices = std::max(most_warps / (row_warps * variant.parts), 1); slices >= 1; --slices) {
    const int results =
        slices * held * (variant.parts * (variant.head_dim / variant.parts + 4) + 2) * static_cast<int>(sizeof(float));
    if (const int bytes = std::max(queries, results); bytes <= limit) {
      return {slices * row_warps * variant.parts, static_cast<unsigned>(bytes + reserved)};
    }
  }
  throw std::runtime_error("[attention] The results of one block do not fit into shared memory.");
}

KernelModule& kernels() {
  static KernelModule module(mlx_cuda_fatbin_decode);
  return module;
}

// head_dim adjacent, and every row on 16 bytes.
bool readable(const mx::array& in) {
  auto fits = [&](int axis) {
    return in.shape(axis) == 1 || in.strides(axis) * static_cast<std::int64_t>(in.itemsize()) % 16 == 0;
  };
  return (in.strides(3) == 1 || in.shape(3) == 1) && fits(0) && fits(1) && fits(2) && in.offset() % 16 == 0;
}

DecodeStrides strides_of(const mx::array& in) {
  return {in.strides(0), in.strides(1), in.strides(2)};
}

class Decode final : public Fused {
 public:
  Decode(const mx::Stream& stream, const AttentionOptions& options, bool mask, bool starts, bool ends, bool sinks)
      : Fused(stream), options_(options), mask_(mask), starts_(starts), ends_(ends), sinks_(sinks) {}

  const char* name() const override {
    return "DecodeAttention";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& that = static_cast<const Decode&>(other);
    auto all = [](const Decode& d) {
      const auto& o = d.options_;
      return std::tuple(o.scale, o.softcap, o.window_left, o.window_right, d.mask_, d.starts_, d.ends_, d.sinks_);
    };
    return all(*this) == all(that);
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    return {inputs[0].shape()};
  }

 protected:
  std::vector<mx::array> compose(const std::vector<mx::array>& inputs) const override {
    return {composed_attention(inputs[0], inputs[1], inputs[2], extras(inputs), options_, queue())};
  }

  void encode(
      const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs, mx::cu::CommandEncoder& encoder) override {
    mx::array& out = outputs[0];
    auto operand = [&](const mx::array& in) { return readable(in) ? in : contiguous_copy(in, encoder, stream()); };
    const mx::array q = operand(inputs[0]);
    const mx::array k = operand(inputs[1]);
    const mx::array v = operand(inputs[2]);
    const auto [mask, starts, ends, sinks] = extras(inputs);
    const int heads = q.shape(1);
    const int head_dim = q.shape(3);
    const int queries = q.shape(2);
    const bool rows_first = queries > 1 && heads > 1 && q.strides(1) == head_dim && q.strides(2) == std::int64_t{heads} * head_dim;
    if (rows_first) {  // as projections leave q: the next reshape needs no copy then
      allocate(out, {std::int64_t{queries} * heads * head_dim, head_dim, std::int64_t{heads} * head_dim, 1}, stream());
    } else {
      allocate(out, stream());
    }

    DecodeParams params{};
    params.batch = q.shape(0);
    params.kv_heads = k.shape(1);
    params.group = heads / params.kv_heads;
    params.q_length = queries;
    params.kv_length = k.shape(2);
    params.head_dim = head_dim;
    params.window_left = options_.window_left;
    params.window_right = options_.window_right;
    params.softcap = options_.softcap;
    params.scale = options_.softcap > 0 ? options_.scale / options_.softcap : options_.scale * kLog2e;
    params.plain = !mask && options_.softcap == 0;

    const int rows = params.group * queries;
    const Variant variant = choose(head_dim, rows);
    // One row of a bool mask for all heads: its bits are gathered first, and what they hide is not read.
    const bool masked = mask && mask->dtype() == mx::bool_ && options_.softcap == 0 && queries == 1 && variant.row_tiles == 1 &&
                        (heads == 1 || mask->strides(1) == 0);
    // One wave of blocks; several where lengths differ, so that short rows do not leave multiprocessors idle for long.
    const std::int64_t units = std::int64_t{params.batch} * params.kv_heads;
    const std::int64_t blocks = std::int64_t{multiprocessors()} * variant.blocks;
    const std::int64_t slots = blocks * (ends || starts || mask ? 4 : 1);
    const int span =
        (options_.window_left >= 0 ? std::min(params.kv_length, options_.window_left + queries) : params.kv_length) + 15;
    const auto most = static_cast<std::int64_t>(span + kFewestKeys - 1) / kFewestKeys;
    const auto least = masked ? static_cast<std::int64_t>(span + kMostKeys - 1) / kMostKeys : 1;
    const auto wanted = static_cast<int>(std::max(std::clamp<std::int64_t>(slots / units, 1, most), least));
    params.chunk = ((span + wanted - 1) / wanted + 63) / 64 * 64;
    params.splits = (span + params.chunk - 1) / params.chunk;

    const std::size_t results = static_cast<std::size_t>(params.splits) * params.batch * heads * queries;
    if (params.splits > 1) {
      params.partial = static_cast<float*>(workspace(results * (head_dim + 2) * sizeof(float), encoder, stream()));
      params.partial_scale = params.partial + results * head_dim;
    }
    for (const mx::array& in : {q, k, v}) {
      encoder.set_input_array(in);
    }
    for (const auto* extra : {&mask, &starts, &ends, &sinks}) {
      if (*extra) {
        encoder.set_input_array(**extra);
      }
    }
    encoder.set_output_array(out);
    params.q = mx::gpu_ptr<void>(q);
    params.k = mx::gpu_ptr<void>(k);
    params.v = mx::gpu_ptr<void>(v);
    params.out = mx::gpu_ptr<void>(out);
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

    const std::string type = q.dtype() == mx::float16 ? "decode_float16_" : "decode_bfloat16_";
    const auto name = type + std::to_string(variant.head_dim) + (variant.row_tiles > 1 ? "_rows" : masked ? "_masked" : "");
    // Of many short blocks, two of half the size hide one another's beginning and end.
    const int warps = params.splits == 1 && units >= 2 * blocks && span <= kShortSpan ? kMostWarps / 2 : kMostWarps;
    const Shape shape = block_shape(variant, rows, warps, masked ? params.chunk / 16 * 4 : 0);
    const dim3 grid(params.splits, params.kv_heads, params.batch);
    encoder.add_kernel_node_ex(kernels().function(name), grid, dim3(shape.warps * 32), dim3(), shape.shared, params);
    if (params.splits > 1) {
      encoder.set_input_array(out);
      encoder.set_output_array(out);
      encoder.add_kernel_node_ex(
          kernels().function(type + "merge"), dim3(params.batch * heads * queries), dim3(128), dim3(), 0, params);
    }
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

  AttentionOptions options_;
  bool mask_;
  bool starts_;
  bool ends_;
  bool sinks_;
};

}  // namespace

mx::array decode_attention(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    const AttentionExtras& extras,
    const AttentionOptions& options,
    const mx::Stream& stream) {
  std::vector<mx::array> inputs{q, k, v};
  for (const auto* extra : {&extras.mask, &extras.starts, &extras.ends, &extras.sinks}) {
    if (*extra) {
      inputs.push_back(**extra);
    }
  }
  auto primitive = std::make_shared<Decode>(
      stream, options, extras.mask.has_value(), extras.starts.has_value(), extras.ends.has_value(), extras.sinks.has_value());
  return mx::array(q.shape(), q.dtype(), std::move(primitive), std::move(inputs));
}

}  // namespace mlx_cuda
