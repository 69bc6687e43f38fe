#include "recurrence/linear_attention.h"

#include "recurrence/calls.h"
#include "recurrence/chunked_params.h"
#include "recurrence/kernels.h"
#include "runtime/device_code.h"
#include "runtime/kernel_table.h"
#include "runtime/memory.h"
#include "runtime/node.h"

#include <mlx/fast.h>
#include <mlx/ops.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace mlx_cuda {

namespace {

KernelModule recurrent("recurrent");
KernelModule recurrent_few("recurrent_few");
KernelModule chunked("chunked");

#define MLX_CUDA_KEYS_ROW(name, keys, channels) {#name, {keys, channels}},
using Keys = KernelRow<int, bool>;
constexpr auto kRecurrent = std::to_array<Keys>({MLX_CUDA_RECURRENT_KERNELS(MLX_CUDA_KEYS_ROW)});
constexpr auto kRecurrentFew = std::to_array<Keys>({MLX_CUDA_RECURRENT_FEW_KERNELS(MLX_CUDA_KEYS_ROW)});
using Delta = KernelRow<std::string_view, bool>;
constexpr auto kPrepare = std::to_array<Delta>({MLX_CUDA_CHUNKED_KERNELS(MLX_CUDA_KERNEL_ROW, MLX_CUDA_NO_ROW)});
constexpr auto kScan = std::to_array<Delta>({MLX_CUDA_CHUNKED_KERNELS(MLX_CUDA_NO_ROW, MLX_CUDA_KERNEL_ROW)});

// Bytes for the parts of long sequences that take turns.
std::int64_t workspace_bytes() {
  return std::clamp<std::int64_t>(device_memory() / 256, 64 << 20, 192 << 20);
}

class Recurrent final : public Stateful<Parts> {
 public:
  using Stateful::Stateful;

  DEFINE_NAME(LinearAttention)

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    const LinearAttention in = from_inputs(inputs, state_);
    const int sequences = in.offsets ? in.offsets->shape(0) - 1 : in.v.shape(0);
    return {in.v.shape(), {sequences, in.v.shape(2), in.v.shape(3), in.k.shape(3)}};
  }

  std::pair<Arrays, std::vector<int>> vmap(const Arrays& inputs, const std::vector<int>& axes) override {
    if (state_.offsets) {
      throw std::invalid_argument("[linear_attention] Packed sequences have no vmap.");
    }
    const auto apply = [this](const Arrays& in) -> Arrays {
      auto [y, state] = linear_attention(from_inputs(in, state_), state_.way, queue());
      return {std::move(y), std::move(state)};
    };
    return vmap_as_batch(inputs, axes, apply, queue());
  }

 protected:
  bool is_composable() const override {
    return state_.way.delta && !state_.offsets;
  }

  Arrays compose(const Arrays& inputs) const override {
    if (!is_composable()) {
      throw std::invalid_argument("[linear_attention] This is differentiated in Python.");
    }
    const LinearAttention in = from_inputs(inputs, state_);
    return mx::fast::gated_delta_update(in.q, in.k, in.v, in.g, in.beta, in.state, in.mask, queue());
  }

  void encode(const Arrays& inputs, Arrays& outputs, CommandEncoder& encoder) override {
    const bool takes_over = state_.state && inputs[5].is_donatable() && inputs[5].flags().row_contiguous && on_16_bytes(inputs[5]);
    LinearAttention in = from_inputs(inputs, state_);
    in.q = with_readable_rows(in.q, encoder, stream());
    in.k = with_readable_rows(in.k, encoder, stream());
    in.v = state_.way.chunked ? with_readable_rows(in.v, encoder, stream()) : with_adjacent_elements(in.v, encoder, stream());
    if (in.g.ndim() == 4) {
      in.g = with_readable_rows(in.g, encoder, stream());
    }
    in.offsets = contiguous(in.offsets, encoder, stream());
    in.state = contiguous_on_16_bytes(in.state, encoder, stream());
    mx::array& y = outputs[0];
    mx::array& state = outputs[1];
    allocate(y, stream());
    if (takes_over) {
      state.copy_shared_buffer(*in.state);
    } else {
      allocate(state, stream());
    }
    if (state_.way.chunked) {
      launch_chunked(in, y, state, encoder);
    } else {
      launch_recurrent(in, y, state, encoder);
    }
  }

 private:
  Recurrence describe(const LinearAttention& in, mx::array& y, mx::array& state, KernelNode& node) const {
    Recurrence p = mlx_cuda::describe(in, state_.way.delta, node);
    p.state_in = node.reads<const float>(in.state);
    p.out = node.writes(y);
    p.state_out = node.writes<float>(state);
    return p;
  }

  void launch_recurrent(const LinearAttention& in, mx::array& y, mx::array& state, CommandEncoder& encoder) const {
    KernelNode node(encoder);
    const Recurrence p = describe(in, y, state, node);
    const bool channels = in.g.ndim() == 4;
    const int keys = p.key_size <= 128 ? 128 : kRecurrentLargestKey;
    const dim3 blocks(ceil_div(p.value_size, kRecurrentRows) * p.value_heads * state.shape(0));
    if (p.length <= kFewTokens) {
      node.launch(recurrent_few.function(kernel_for(kRecurrentFew, keys, channels)), blocks, kFewThreads, 0, p);
    } else {
      node.launch(
          recurrent.function(kernel_for(kRecurrent, keys, channels)), blocks, kRecurrentThreads,
          recurrent_shared_bytes(keys, channels), p);
    }
  }

  void launch_chunked(LinearAttention& in, mx::array& y, mx::array& state, CommandEncoder& encoder) const {
    const int values = ceil_div(in.v.shape(3), kScanColumns);
    const PreparedMemory sizes(in.v.shape(3));
    const std::int64_t heads = std::int64_t{in.v.shape(0)} * in.v.shape(2);
    const int all = ceil_div(in.v.shape(1), kChunk);
    const int fitting = static_cast<int>(std::clamp<std::int64_t>(workspace_bytes() / (heads * sizes.bytes()), 1, all));
    const int most = ceil_div(all, ceil_div(all, fitting));  // parts of the same size
    mx::array memory =
        temporary_in_turn({static_cast<int>(most * heads), static_cast<int>(sizes.bytes())}, mx::uint8, encoder, queue());
    const std::string dtype = type_name(in.v.dtype());
    for (int first = 0; first < all; first += most) {
      const int chunks = std::min(most, all - first);
      const auto prepared = [&](KernelNode& node) {
        Prepared result = sizes.divide(node.writes<char>(memory), chunks, heads);
        result.first = first * kChunk;
        return result;
      };
      {
        KernelNode node(encoder);
        const Recurrence of = describe(in, y, state, node);
        const Prepared to = prepared(node);
        node.launch(
            chunked.function(kernel_for(kPrepare, dtype, state_.way.delta)), dim3(chunks * heads), kChunkThreads, kPrepareBytes, of,
            to);
      }
      KernelNode node(encoder);
      const Recurrence of = describe(in, y, state, node);
      const Prepared from = prepared(node);
      node.launch(
          chunked.function(kernel_for(kScan, dtype, state_.way.delta)), dim3(values * heads), kChunkThreads, kScanBytes, of, from);
      in.state = state;
    }
  }
};

}  // namespace

std::pair<mx::array, mx::array> linear_attention(const LinearAttention& in, Way way, const mx::Stream& stream) {
  Arrays inputs = to_inputs(in);
  auto primitive = std::make_shared<Recurrent>(stream, parts_of(in, way));
  Arrays results = mx::array::make_arrays(primitive->output_shapes(inputs), {in.v.dtype(), mx::float32}, primitive, inputs);
  return {results[0], results[1]};
}

}  // namespace mlx_cuda
