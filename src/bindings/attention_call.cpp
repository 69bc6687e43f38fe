#include "bindings/attention_call.h"

#include <algorithm>
#include <cmath>

namespace mlx_cuda {

namespace {

bool broadcasts(const mx::array& mask, const mx::Shape& scores) {
  const std::size_t missing = scores.size() - mask.ndim();
  for (std::size_t axis = 0; axis < mask.ndim(); ++axis) {
    const int size = mask.shape(static_cast<int>(axis));
    if (size != 1 && size != scores[missing + axis]) {
      return false;
    }
  }
  return true;
}

}  // namespace

std::optional<int> count_from(nb::handle number) {
  int count = -1;
  if (!number.is_none() && (!PyLong_CheckExact(number.ptr()) || !nb::try_cast(number, count) || count < 0)) {
    return std::nullopt;
  }
  return count;
}

bool read_window(Call& call, nb::handle window_size, int keys) {
  const bool both = nb::isinstance<nb::tuple>(window_size);
  if (both && nb::len(window_size) != 2) {
    return false;
  }
  const auto left = count_from(both ? nb::handle(window_size[0]) : window_size);
  const auto right = both ? count_from(window_size[1]) : -1;
  if (!left || !right) {
    return false;
  }
  call.options.window_left = *left < keys ? *left : -1;
  call.options.window_right = *right;
  return true;
}

bool read_numbers(Call& call, const MaybeNumber& scale, const MaybeNumber& softcap, int head_dim) {
  AttentionOptions& options = call.options;
  options.scale = static_cast<float>(scale ? *scale : std::pow(std::max(head_dim, 1), -0.5));
  options.softcap = static_cast<float>(softcap.value_or(0));
  return std::isfinite(options.softcap) && (options.softcap > 0 || !softcap) && options.scale > 0;
}

bool is_vector(const MaybeArray& values, int size, mx::Dtype dtype) {
  return !values || (values->ndim() == 1 && values->shape(0) == size && values->dtype() == dtype);
}

bool read_mask(Call& call, const Mask& mask, const mx::Shape& scores, mx::Dtype dtype) {
  if (const auto* name = std::get_if<std::string>(&mask)) {
    call.options.window_right = 0;
    return *name == "causal";
  }
  if (const auto* values = std::get_if<mx::array>(&mask)) {
    // Python looks for rows of very low numbers in an additive mask, unless the result tells them apart.
    const bool as_it_is = values->dtype() == mx::bool_ || (values->dtype() == dtype && (call.extras.sinks || call.lse));
    call.extras.mask = *values;
    return as_it_is && values->ndim() <= 4 && broadcasts(*values, scores);
  }
  return true;
}

bool same_sizes(const mx::array& a, const mx::array& b, std::initializer_list<int> axes) {
  return std::all_of(axes.begin(), axes.end(), [&](int axis) { return a.shape(axis) == b.shape(axis); });
}

bool same_dtype(const mx::array& q, const mx::array& k, const mx::array& v) {
  return q.dtype() == k.dtype() && q.dtype() == v.dtype();
}

Key key_of(const Call& call, mx::Dtype dtype, std::initializer_list<int> sizes, const mx::Stream& stream) {
  Key key(stream.index, stream.device.type, stream.device.index, dtype.val());
  for (const int size : sizes) {
    key.add(size);
  }
  const auto& [mask, starts, ends, sinks] = call.extras;
  key.add(static_cast<char>(!mask ? 0 : mask->dtype() == mx::bool_ ? 1 : 2));
  for (const bool there : {starts.has_value(), ends.has_value(), sinks.has_value(), call.lse}) {
    key.add(there);
  }
  key.add(call.options.scale);
  key.add(call.options.softcap);
  key.add(call.options.window_left);
  key.add(call.options.window_right);
  return key;
}

mx::Stream stream_of(const StreamOrDevice& stream) {
  if (const auto* named = std::get_if<mx::Stream>(&stream)) {
    return *named;
  }
  if (const auto* device = std::get_if<mx::Device>(&stream)) {
    return mx::default_stream(*device);
  }
  const auto* kind = std::get_if<mx::Device::DeviceType>(&stream);
  return mx::default_stream(kind ? mx::Device(*kind) : mx::default_device());
}

nb::object returned(const std::vector<mx::array>& results, bool lse) {
  return lse ? nb::make_tuple(results[0], results[1]) : nb::cast(results[0]);
}

}  // namespace mlx_cuda
