#include "recurrence/short_conv.h"

#include "recurrence/kernels.h"
#include "recurrence/short_conv_params.h"
#include "runtime/device_code.h"
#include "runtime/kernel_table.h"
#include "runtime/memory.h"
#include "runtime/node.h"
#include "runtime/pdl.h"
#include "runtime/status.h"

#include <mlx/ops.h>

#include <string>

namespace mlx_cuda {

namespace {

KernelModule kernels("short_conv");

constexpr auto kToken =
    std::to_array<KernelRow<std::string_view>>({MLX_CUDA_SHORT_CONV_KERNELS(MLX_CUDA_KERNEL_ROW, MLX_CUDA_NO_ROW)});
constexpr auto kTokens =
    std::to_array<KernelRow<std::string_view, int>>({MLX_CUDA_SHORT_CONV_KERNELS(MLX_CUDA_NO_ROW, MLX_CUDA_KERNEL_ROW)});

// Which inputs there are besides x and the weight, where the first rows come from, and what comes after.
struct ShortConvParts {
  bool bias, state, padded, silu;
  bool operator==(const ShortConvParts&) const = default;
};

class ShortConvolution final : public Stateful<ShortConvParts> {
 public:
  using Stateful::Stateful;

  DEFINE_NAME(ShortConvolution)

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    const mx::array& x = inputs[0];
    const int kept = inputs[1].shape(1) - 1;
    return {{x.shape(0), x.shape(1) - (state_.padded ? 0 : kept), x.shape(2)}, {x.shape(0), kept, x.shape(2)}};
  }

 protected:
  Arrays compose(const Arrays& inputs) const override {
    const ShortConv in = named(inputs);
    const int kept = in.weight.shape(1) - 1, channels = in.x.shape(2);
    mx::array rows = in.x;
    if (in.padded) {
      const mx::array before = in.state.value_or(mx::zeros({in.x.shape(0), kept, channels}, in.x.dtype(), queue()));
      rows = mx::concatenate({before, in.x}, 1, queue());
    }
    const int length = rows.shape(1) - kept;
    mx::array out = length > 0 ? mx::conv1d(rows, in.weight, 1, 0, 1, channels, queue()) : in.x;
    if (in.bias) {
      out = mx::add(out, *in.bias, queue());
    }
    if (state_.silu) {
      out = mx::multiply(out, mx::sigmoid(out, queue()), queue());
    }
    return {out, mx::slice(rows, {0, length, 0}, {rows.shape(0), length + kept, channels}, queue())};
  }

  void encode(const Arrays& inputs, Arrays& outputs, CommandEncoder& encoder) override {
    const mx::array &out = outputs[0], &weight = inputs[1];
    const bool vectors = out.shape(2) % ShortConvParams::kTile == 0 && (weight.shape(1) == 3 || weight.shape(1) == 4);
    if (out.shape(1) != 1 && (out.size() == 0 || !vectors)) {  // a graph that was made for one token
      throw Unavailable("[short_conv] No kernel takes so many tokens with these channels and taps.");
    }
    allocate(outputs[0], stream());
    allocate(outputs[1], stream());
    encode_short_conv(named(inputs), state_.silu, false, outputs[0], outputs[1], encoder, stream());
  }

 private:
  ShortConv named(const Arrays& inputs) const {
    const auto bias = state_.bias ? std::optional(inputs[2]) : std::nullopt;
    const auto state = state_.state ? std::optional(inputs.back()) : std::nullopt;
    return {inputs[0], inputs[1], bias, state, state_.padded};
  }
};

}  // namespace

std::pair<mx::array, mx::array> short_conv(const ShortConv& in, bool silu, const mx::Stream& stream) {
  const Arrays inputs = joined({in.x, in.weight}, in.bias, in.state);
  const Arrays results = results_of<ShortConvolution>(
      inputs, in.x.dtype(), stream, ShortConvParts{in.bias.has_value(), in.state.has_value(), in.padded, silu});
  return {results[0], results[1]};
}

void encode_short_conv(
    ShortConv in, bool silu, bool constant, mx::array& out, mx::array& next, CommandEncoder& encoder, const mx::Stream& stream) {
  const auto readable = [&](const mx::array& rows) {
    const bool vectors = rows.shape(2) % ShortConvParams::kTile == 0;
    return vectors ? with_readable_rows(rows, encoder, stream) : contiguous_on_16_bytes(rows, encoder, stream);
  };
  in.x = readable(in.x);
  in.weight = contiguous_on_16_bytes(in.weight, encoder, stream);
  in.bias = contiguous_on_16_bytes(in.bias, encoder, stream);
  if (in.state) {
    in.state = readable(*in.state);
  }
  ShortConvParams params{};
  params.channels = in.x.shape(2);
  params.taps = in.weight.shape(1);
  params.length = out.shape(1);
  params.silu = silu;
  params.constant = constant;
  const bool tiled = params.length > 1;
  const int channels = tiled ? ShortConvParams::kTile : 2;  // of a thread
  const dim3 blocks(
      tiled ? ceil_div(params.length, ShortConvParams::kTile) : 1,
      ceil_div(ceil_div(params.channels, channels), ShortConvParams::kThreads), in.x.shape(0));
  KernelNode node(encoder);
  const char* const rows = node.reads<char>(in.x);
  params.batch = in.x.strides(0);
  params.row = in.x.strides(1);
  params.rows = in.padded ? rows : rows + (params.taps - 1) * params.row * static_cast<long long>(in.x.itemsize());
  params.weight = node.reads(in.weight);
  params.bias = node.reads(in.bias);
  const mx::array& before = in.state ? *in.state : in.x;
  params.kept = in.state ? node.reads<char>(before) : in.padded ? nullptr : rows;
  params.kept_batch = before.strides(0);
  params.kept_row = before.strides(1);
  params.out = node.writes(out);
  params.next = node.writes(next);
  const std::string dtype = type_name(out.dtype());
  CUfunction kernel = kernels.function(tiled ? kernel_for(kTokens, dtype, params.taps) : kernel_for(kToken, dtype));
  node.launch(constant ? with_pdl(kernel) : kernel, blocks, ShortConvParams::kThreads, 0, params);
}

}  // namespace mlx_cuda
