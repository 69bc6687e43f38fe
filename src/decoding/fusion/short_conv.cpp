#include "decoding/fusion/short_conv.h"

#include "decoding/graph/views.h"
#include "recurrence/short_conv.h"
#include "recurrence/short_conv_params.h"
#include "runtime/device_code.h"
#include "runtime/memory.h"

#include <mlx/primitives.h>

#include <algorithm>

namespace mlx_cuda {

namespace {

// Whether each channel has its own taps, and the result has one row.
bool is_short(const Plan& plan, const Item& convolution) {
  const mx::array& x = convolution.inputs[0];
  const mx::array& weight = convolution.inputs[1];
  const mx::array& out = convolution.outputs[0];
  if (x.ndim() != 3 || !is_half(x.dtype()) || weight.dtype() != x.dtype() || out.dtype() != x.dtype()) {
    return false;
  }
  const auto [strides, low, high, dilation, input_dilation, groups, flip] =
      static_cast<const mx::Convolution&>(out.primitive()).state();
  const auto all = [](const std::vector<int>& values, int wanted) {
    return std::all_of(values.begin(), values.end(), [=](int value) { return value == wanted; });
  };
  const int taps = weight.shape(1);
  return all(strides, 1) && all(low, 0) && all(high, 0) && all(dilation, 1) && all(input_dilation, 1) && !flip &&
         groups == x.shape(2) && out.shape() == mx::Shape{x.shape(0), 1, x.shape(2)} && x.shape(1) == taps && taps > 1 &&
         taps <= ShortConvParams::kMostTaps && x.shape(2) % 2 == 0 &&
         x.shape(2) <= 2 * ShortConvParams::kThreads * ShortConvParams::kMostBlocks && x.shape(0) <= ShortConvParams::kMostBlocks &&
         !plan.giver(weight) && weight.flags().row_contiguous && on_16_bytes(weight);
}

// Of a concatenation that is read twice, what its other reader gives, if that is all but the first row.
const Item* kept_of(const Plan& plan, const mx::array& x, const Item& convolution) {
  const auto& readers = plan.readers(x);
  if (readers.size() != 2) {
    return nullptr;
  }
  const Item* slice = readers[readers[0] == &convolution ? 1 : 0];
  if (slice->name != "Slice") {
    return nullptr;
  }
  const mx::array& rows = slice->outputs[0];
  const auto [begin, end, strides] = static_cast<const mx::Slice&>(rows.primitive()).state();
  const bool rest = begin == mx::Shape{0, 1, 0} && strides == mx::Shape{1, 1, 1} &&
                    rows.shape() == mx::Shape{x.shape(0), x.shape(1) - 1, x.shape(2)};
  if (!rest) {
    return nullptr;
  }
  const Item* contiguous = reader_of(plan, rows);
  return contiguous && contiguous->name == "Contiguous" ? contiguous : slice;
}

}  // namespace

std::optional<Item> short_conv_item(const Plan& plan, Gates& gates, const Item& convolution) {
  const mx::array& x = convolution.inputs[0];
  const Item* both = given_by(plan, x, "Concatenate");
  if (!both || both->inputs.size() != 2 || !is_short(plan, convolution) ||
      static_cast<const mx::Concatenate&>(x.primitive()).state() != 1 || both->inputs[1].shape(1) != 1) {
    return std::nullopt;
  }
  const Item* kept = kept_of(plan, x, convolution);
  if (!kept) {
    return std::nullopt;
  }
  mx::array out = convolution.outputs[0];
  MaybeArray bias;
  const Item* reader = reader_of(plan, out);
  if (const auto other = reader ? added_to(plan, *reader, out) : std::nullopt) {
    const bool is_row = reader->outputs[0].shape() == out.shape() && !plan.giver(*other) && other->strides(2) == 1 &&
                        (other->shape(0) == 1 || other->strides(0) == 0);
    if (is_row && on_16_bytes(*other)) {
      bias = *other;
      out = reader->outputs[0];
      reader = reader_of(plan, out);
    }
  }
  const bool silu = reader && reader->inputs[0].id() == out.id() && gates.is_silu(*reader);
  if (silu) {
    out = reader->outputs[0];
  }
  const mx::array before = both->inputs[0];
  const mx::array row = both->inputs[1];
  const mx::array weight = convolution.inputs[1];
  return Item{
      silu ? "short convolution + silu" : "short convolution",
      {before, row},
      {out, kept->outputs[0]},
      [=, out = out, next = kept->outputs[0]](const mx::Stream& stream) mutable {
        allocate(out, stream);
        allocate(next, stream);
        const auto channels = bias ? std::optional(view(*bias, {bias->shape(2)}, {1}, true)) : std::nullopt;
        encode_short_conv({row, weight, channels, before}, silu, true, out, next, mx::cu::get_command_encoder(stream), stream);
      }};
}

}  // namespace mlx_cuda
