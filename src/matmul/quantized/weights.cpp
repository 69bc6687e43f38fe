#include "matmul/quantized/weights.h"

#include "runtime/memory.h"

#include <mlx/ops.h>

#include <utility>

namespace mlx_cuda {

namespace {

// The distance in elements from one matrix of a stack to the next; none when they are not evenly spaced. 0: there is one, or all
// are the same.
std::optional<std::int64_t> matrix_distance(const mx::array& in) {
  std::int64_t distance = 0;
  std::int64_t outer = 0;  // the expected stride of the next outer dimension
  for (int axis = static_cast<int>(in.ndim()) - 3; axis >= 0; --axis) {
    if (in.shape(axis) == 1) {
      continue;
    }
    if (outer == 0) {
      distance = in.strides(axis);
    } else if (in.strides(axis) != outer) {
      return std::nullopt;
    }
    outer = in.strides(axis) * in.shape(axis);
    if (outer == 0) {
      return std::nullopt;
    }
  }
  return distance;
}

// Whether the rows of each matrix follow one another.
bool matrices_adjacent(const mx::array& in) {
  return elements_adjacent(in) && (in.strides(-2) == in.shape(-1) || in.shape(-2) == 1);
}

// Whether scales and biases are read without a copy.
bool scales_fit(const QuantizedWeights& weights) {
  const auto distance = matrix_distance(weights.scales);
  return distance && matrices_adjacent(weights.scales) &&
         (!weights.biases || (matrix_distance(*weights.biases) == distance && matrices_adjacent(*weights.biases)));
}

}  // namespace

bool scales_are_wide(const QuantizedWeights& weights) {
  const mx::array& scales = weights.scales;
  const auto size = static_cast<int>(scales.itemsize());
  const int bytes = QuantizedGemmParams::kScaleRange / weights.group_size * size;
  if (scales.shape(-1) * size % bytes != 0) {
    return false;
  }
  return !scales_fit(weights) ||  // so that they are copied
         (is_aligned(scales, *matrix_distance(scales), bytes) &&
          (!weights.biases || is_aligned(*weights.biases, *matrix_distance(*weights.biases), bytes)));
}

bool is_aligned(const mx::array& in, std::int64_t distance, int bytes) {
  const auto size = static_cast<std::int64_t>(in.itemsize());
  return in.offset() % bytes == 0 && distance * size % bytes == 0;
}

Readable readable(QuantizedWeights weights, bool adjacent, int alignment, CommandEncoder& encoder, const mx::Stream& stream) {
  mx::array& w = weights.w;
  const auto fits = [&] {
    const auto distance = matrix_distance(w);
    return distance && (adjacent ? matrices_adjacent(w) : elements_adjacent(w)) && is_aligned(w, *distance, alignment) &&
           (w.shape(-2) == 1 || is_aligned(w, w.strides(-2), alignment));
  };
  if (!fits()) {
    w = contiguous_copy(w, encoder, stream);
  }
  mx::array& scales = weights.scales;
  if (!scales_fit(weights)) {
    scales = contiguous_copy(scales, encoder, stream);
    if (weights.biases) {
      weights.biases = contiguous_copy(*weights.biases, encoder, stream);
    }
  }
  const std::int64_t row_bytes = (w.shape(-2) == 1 ? w.shape(-1) : w.strides(-2)) * 4;
  const std::int64_t w_distance = *matrix_distance(w) * 4;
  const std::int64_t scale_distance = *matrix_distance(scales) * static_cast<std::int64_t>(scales.itemsize());
  return {std::move(weights), w_distance, row_bytes, scale_distance};
}

std::string format_name(const QuantizedForm& form) {
  return form.mode == "affine" ? form.mode + std::to_string(form.bits) : form.mode;
}

void name_inputs(const QuantizedWeights& weights, CommandEncoder& encoder) {
  encoder.set_input_array(weights.w);
  encoder.set_input_array(weights.scales);
  if (weights.biases) {
    encoder.set_input_array(*weights.biases);
  }
}

mx::array values_of(const QuantizedWeights& weights, mx::Dtype dtype, const mx::Stream& stream) {
  const auto& w = weights;
  return mx::dequantize(w.w, w.scales, w.biases, w.group_size, w.bits, w.mode, std::nullopt, dtype, stream);
}

}  // namespace mlx_cuda
