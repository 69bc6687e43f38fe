// What a call of attention asks for, read from its arguments as Python reads them.
//
// Arguments that Python would convert or refuse make no call. Such a call is neither remembered nor answered natively.
#pragma once

#include "attention/composed.h"
#include "bindings/answered.h"

#include <mlx/array.h>
#include <mlx/device.h>
#include <mlx/stream.h>
#include <nanobind/nanobind.h>

#include <initializer_list>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace mlx_cuda {

namespace nb = nanobind;

using Mask = std::variant<std::monostate, std::string, mx::array>;
using MaybeArray = std::optional<mx::array>;
using MaybeNumber = std::optional<double>;
using StreamOrDevice = std::variant<std::monostate, mx::Stream, mx::Device, mx::Device::DeviceType>;

struct Call {
  AttentionOptions options{};
  AttentionExtras extras{};  // the mask with up to 4 dimensions
  bool lse = false;
};

// A number that is not negative, and -1 for None.
std::optional<int> count_from(nb::handle number);

// Each reads its arguments into the call, or says that they make none.
bool read_numbers(Call& call, const MaybeNumber& scale, const MaybeNumber& softcap, int head_dim);
bool read_window(Call& call, nb::handle window_size, int keys);
bool read_mask(Call& call, const Mask& mask, const mx::Shape& scores, mx::Dtype dtype);

bool is_vector(const MaybeArray& values, int size, mx::Dtype dtype);
bool same_dtype(const mx::array& q, const mx::array& k, const mx::array& v);
bool same_sizes(const mx::array& a, const mx::array& b, std::initializer_list<int> axes);

// All that the rules look at but the number of keys, given the sizes that they do.
Key key_of(const Call& call, mx::Dtype dtype, std::initializer_list<int> sizes, const mx::Stream& stream);

// The stream that MLX's own operations would run on.
mx::Stream stream_of(const StreamOrDevice& stream);

// The results as Python returns them.
nb::object returned(const std::vector<mx::array>& results, bool lse);

}  // namespace mlx_cuda
