// Gradients of linear attention by chunks: the host code of chunked_back.cu and chunk_gradients.cu.
#include "recurrence/calls.h"
#include "recurrence/chunked_params.h"
#include "recurrence/kernels.h"
#include "recurrence/linear_attention.h"
#include "runtime/device_code.h"
#include "runtime/kernel_table.h"
#include "runtime/memory.h"

#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace mlx_cuda {

namespace {

KernelModule chunked("chunked");
KernelModule chunked_back("chunked_back");
KernelModule gradients_module("chunk_gradients");

using Row = KernelRow<std::string_view, bool>;
constexpr auto kPrepare = std::to_array<Row>({MLX_CUDA_CHUNKED_KERNELS(MLX_CUDA_KERNEL_ROW, MLX_CUDA_NO_ROW)});
constexpr auto kScans = std::to_array<Row>({MLX_CUDA_CHUNKED_BACK_KERNELS(MLX_CUDA_KERNEL_ROW)});
constexpr auto kGradients = std::to_array<Row>({MLX_CUDA_CHUNK_GRADIENT_KERNELS(MLX_CUDA_KERNEL_ROW, MLX_CUDA_NO_ROW)});
constexpr auto kSums =
    std::to_array<KernelRow<std::string_view>>({MLX_CUDA_CHUNK_GRADIENT_KERNELS(MLX_CUDA_NO_ROW, MLX_CUDA_KERNEL_ROW)});

// Both are gradients; their own gradients are those of a composition in Python.
template <typename Own>
class Derivative : public Stateful<Parts> {
 public:
  using Stateful::Stateful;

  static Arrays results(const Arrays& inputs, const Parts& parts, const mx::Stream& stream) {
    auto primitive = std::make_shared<Own>(stream, parts);
    return mx::array::make_arrays(primitive->output_shapes(inputs), primitive->output_dtypes(inputs[2].dtype()), primitive, inputs);
  }

  std::pair<Arrays, std::vector<int>> vmap(const Arrays& inputs, const std::vector<int>& axes) override {
    const auto apply = [this](const Arrays& in) { return results(in, state_, queue()); };
    return vmap_as_batch(inputs, axes, apply, queue());
  }

 protected:
  bool is_composable() const override {
    return false;
  }

  Arrays compose(const Arrays&) const override {
    throw std::invalid_argument(std::string("[") + name() + "] This is differentiated in Python.");
  }

  // The call among the inputs.
  LinearAttention call(const Arrays& inputs, CommandEncoder& encoder) {
    LinearAttention in = from_inputs(inputs, state_);
    in.q = with_readable_rows(in.q, encoder, stream());
    in.k = with_readable_rows(in.k, encoder, stream());
    in.v = with_readable_rows(in.v, encoder, stream());
    return in;
  }
};

// Inputs: those of the call, the gradients of y, those of the last state.
class ScanBack final : public Derivative<ScanBack> {
 public:
  using Derivative::Derivative;

  DEFINE_NAME(LinearAttentionScan)

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    const mx::array &k = inputs[1], &v = inputs[2];
    const int batch = v.shape(0), heads = v.shape(2), chunks = ceil_div(v.shape(1), kChunk);
    const mx::Shape state{batch, heads, chunks, k.shape(3), v.shape(3)};
    const mx::Shape change{batch, heads, chunks, kChunk, v.shape(3)};
    std::vector<mx::Shape> shapes{state, change, state, change, {batch, heads, v.shape(3), k.shape(3)}};
    if (state_.way.delta) {
      shapes.push_back({batch, heads, chunks, kChunk, kChunk});
    }
    return shapes;
  }

  std::vector<mx::Dtype> output_dtypes(mx::Dtype dtype) const {
    std::vector<mx::Dtype> dtypes(state_.way.delta ? 6 : 5, dtype);
    dtypes[4] = mx::float32;
    return dtypes;
  }

 protected:
  void encode(const Arrays& inputs, Arrays& outputs, CommandEncoder& encoder) override {
    LinearAttention in = call(inputs, encoder);
    in.state = contiguous(in.state, encoder, stream());
    LinearAttention back = in;
    back.v = with_readable_rows(inputs[state_.count()], encoder, stream());
    back.state = contiguous(inputs[state_.count() + 1], encoder, stream());
    for (mx::array& out : outputs) {
      allocate(out, stream());
    }
    const mx::Dtype dtype = in.v.dtype();
    const int values = ceil_div(in.v.shape(3), kScanColumns);
    const int chunks = ceil_div(in.v.shape(1), kChunk);
    const int heads = in.v.shape(0) * in.v.shape(2);
    const PreparedMemory sizes(in.v.shape(3));
    mx::array memory = temporary({chunks * heads, static_cast<int>(sizes.bytes())}, mx::uint8, encoder, stream());
    const auto prepared = [&](KernelNode& node) { return sizes.divide(node.writes<char>(memory), chunks, heads); };
    {
      KernelNode node(encoder);
      const Recurrence of = describe(in, state_.way.delta, node);
      Prepared to = prepared(node);
      to.solve = state_.way.delta ? node.writes(outputs[5]) : nullptr;
      node.launch(
          chunked.function(kernel_for(kPrepare, type_name(dtype), state_.way.delta)), dim3(chunks * heads), kChunkThreads,
          kPrepareBytes, of, to);
    }
    KernelNode node(encoder);
    Recurrence of = describe(in, state_.way.delta, node);
    of.state_in = node.reads<const float>(in.state);
    Recurrence back_of = describe(back, state_.way.delta, node);
    back_of.state_in = node.reads<const float>(back.state);
    back_of.state_out = node.writes<float>(outputs[4]);
    const Prepared from = prepared(node);
    Kept kept{};
    kept.states = node.writes(outputs[0]);
    kept.changes = node.writes(outputs[1]);
    kept.gradients = node.writes(outputs[2]);
    kept.change_gradients = node.writes(outputs[3]);
    node.launch(
        chunked_back.function(kernel_for(kScans, type_name(dtype), state_.way.delta)), dim3(2 * values * heads), kChunkThreads,
        std::max(kScanBytes, kScanBackBytes), of, back_of, from, kept);
  }
};

// Inputs: those of the call except its state, the gradients of y, then the outputs of ScanBack except its last gradient.
class ChunkGradients final : public Derivative<ChunkGradients> {
 public:
  using Derivative::Derivative;

  DEFINE_NAME(LinearAttentionGradients)

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    const mx::array &k = inputs[1], &v = inputs[2];
    const mx::Shape gates{v.shape(0), v.shape(1), v.shape(2)};
    return {k.shape(), k.shape(), v.shape(), gates, gates};
  }

  std::vector<mx::Dtype> output_dtypes(mx::Dtype dtype) const {
    return {dtype, dtype, dtype, mx::float32, mx::float32};
  }

 protected:
  void encode(const Arrays& inputs, Arrays& outputs, CommandEncoder& encoder) override {
    const LinearAttention in = call(inputs, encoder);
    std::size_t next = state_.count();
    const mx::array dy = with_readable_rows(inputs[next++], encoder, stream());
    Arrays found;
    for (; next < inputs.size(); ++next) {
      found.push_back(contiguous_on_16_bytes(inputs[next], encoder, stream()));
    }
    for (mx::array& out : outputs) {
      allocate(out, stream());
    }
    // Of each head of the values, before those that share a query and a key are summed up.
    const int shared = in.v.shape(2) / in.k.shape(2);
    const mx::Shape apart{shared, static_cast<int>(in.k.size() / in.k.shape(3)), in.k.shape(3)};
    mx::array q = shared > 1 ? temporary(apart, in.k.dtype(), encoder, stream()) : outputs[0];
    mx::array k = shared > 1 ? temporary(apart, in.k.dtype(), encoder, stream()) : outputs[1];
    {
      KernelNode node(encoder);
      const Recurrence of = describe(in, state_.way.delta, node);
      Kept from{};
      from.states = node.reads(found[0]);
      from.changes = node.reads(found[1]);
      from.gradients = node.reads(found[2]);
      from.change_gradients = node.reads(found[3]);
      from.solve = state_.way.delta ? node.reads(found[4]) : nullptr;
      Gradients to{};
      to.dy = operand(dy, node);
      to.q = node.writes(q);
      to.k = node.writes(k);
      to.v = node.writes(outputs[2]);
      to.g = node.writes<float>(outputs[3]);
      to.beta = node.writes<float>(outputs[4]);
      to.chunks = ceil_div(of.length, kChunk);
      to.batches = in.v.shape(0);
      node.launch(
          gradients_module.function(kernel_for(kGradients, type_name(in.v.dtype()), state_.way.delta)),
          dim3(to.chunks * to.batches * of.value_heads), kGradientThreads, kGradientBytes, of, from, to);
    }
    if (shared > 1) {
      KernelNode node(encoder);
      SharedSums sums{};
      sums.q = node.reads(q);
      sums.k = node.reads(k);
      sums.q_sum = node.writes(outputs[0]);
      sums.k_sum = node.writes(outputs[1]);
      sums.units = static_cast<long long>(in.k.size() / 8);
      sums.shared = shared;
      node.launch(
          gradients_module.function(kernel_for(kSums, type_name(in.k.dtype()))),
          dim3(static_cast<unsigned>(2 * ceil_div<long long>(sums.units, kSumThreads))), kSumThreads, 0, sums);
    }
  }
};

}  // namespace

std::optional<Arrays> linear_attention_scan(
    const LinearAttention& in, const mx::array& dy, const mx::array& last, bool delta, const mx::Stream& stream) {
  mx::cu::device(stream.device).make_current();
  const bool there = are_available([&] {
    chunked.function(kernel_for(kPrepare, type_name(in.v.dtype()), delta));
    chunked_back.function(kernel_for(kScans, type_name(in.v.dtype()), delta));
  });
  if (!there) {
    return std::nullopt;
  }
  return ScanBack::results(joined(to_inputs(in), dy, last), parts_of(in, {delta, true}), stream);
}

std::optional<Arrays> linear_attention_gradients(
    const LinearAttention& in, const mx::array& dy, const Arrays& scan, const mx::Stream& stream) {
  mx::cu::device(stream.device).make_current();
  if (in.v.shape(3) > kGradientValues || shared_memory_limit() < static_cast<int>(kGradientBytes)) {
    return std::nullopt;
  }
  const bool delta = scan.size() > 5;
  const bool there = are_available([&] {
    gradients_module.function(kernel_for(kGradients, type_name(in.v.dtype()), delta));
    if (in.v.shape(2) > in.k.shape(2)) {
      gradients_module.function(kernel_for(kSums, type_name(in.k.dtype())));
    }
  });
  if (!there) {
    return std::nullopt;
  }
  LinearAttention own = in;
  own.state.reset();
  const auto solve = delta ? std::optional(scan[5]) : std::nullopt;
  const Arrays inputs = joined(to_inputs(own), dy, scan[0], scan[1], scan[2], scan[3], solve);
  return ChunkGradients::results(inputs, parts_of(own, {delta, true}), stream);
}

}  // namespace mlx_cuda
