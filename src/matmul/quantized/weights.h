// Quantized weights as inputs of primitives.
#pragma once

#include "matmul/quantized/params.h"
#include "runtime/fused.h"

#include <mlx/backend/cuda/utils.h>

#include <bit>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace mlx_cuda {

// A matrix [rows, inner] or a stack of them, [..., rows, inner]: `w` has the values packed into uint32, `scales` one scale for each
// group of them along inner. With mode "affine" the values are integers of `bits` bits, and there are `biases`; scales and biases
// have the dtype of the results. The others have floats of 4 or 8 bits, and scales as bytes.
struct QuantizedForm {
  int group_size;
  int bits;
  std::string mode;

  bool operator==(const QuantizedForm&) const = default;
};

struct QuantizedWeights : QuantizedForm {
  mx::array w;
  mx::array scales;
  MaybeArray biases;

  int inner() const {
    return static_cast<int>(static_cast<std::int64_t>(w.shape(-1)) * 32 / bits);
  }
  int matrices() const {
    return static_cast<int>(w.size() / w.shape(-1) / w.shape(-2));
  }
};

// Weights in layouts that the kernels read, and the distances in bytes.
struct Readable {
  QuantizedWeights weights;
  std::int64_t w_distance;
  std::int64_t row_bytes;
  std::int64_t scale_distance;
};

// `adjacent`: rows of w must be adjacent. `alignment`: their alignment in bytes. Copies arrays that do not fit.
Readable readable(QuantizedWeights weights, bool adjacent, int alignment, CommandEncoder& encoder, const mx::Stream& stream);

// Whether the scales of QuantizedGemmParams::kScaleRange values can be read at once, in the layout of `readable`.
bool scales_are_wide(const QuantizedWeights& weights);

// Whether an array, and every `distance`-th element of it, is aligned to that many bytes. The offset suffices: an array that
// MLX's allocator aligns to only 8 bytes is so small that no wider loads are used.
bool is_aligned(const mx::array& in, std::int64_t distance, int bytes);

// As kernels are named after it: "affine4", "mxfp4", ...
std::string format_name(const QuantizedForm& form);

inline int divide_up(std::int64_t value, std::int64_t by) {
  return static_cast<int>((value + by - 1) / by);
}

// Names the arrays as inputs of the next node.
void name_inputs(const QuantizedWeights& weights, CommandEncoder& encoder);

// The kernel parameters of the weights.
template <typename Params>
void set_weights(Params& params, const Readable& in) {
  params.w = mx::gpu_ptr<void>(in.weights.w);
  params.scales = mx::gpu_ptr<void>(in.weights.scales);
  params.biases = in.weights.biases ? mx::gpu_ptr<void>(*in.weights.biases) : nullptr;
  params.w_distance = in.w_distance;
  params.scale_distance = in.scale_distance;
  params.group_shift = std::countr_zero(static_cast<unsigned>(in.weights.group_size));
}

// The values as an operation of MLX.
mx::array values_of(const QuantizedWeights& weights, mx::Dtype dtype, const mx::Stream& stream);

// Inputs of a primitive: those `before`, the weights, and those of `after` that are there.
Arrays inputs_with(Arrays before, const QuantizedWeights& in, const auto&... after) {
  return joined(std::move(before), in.w, in.scales, in.biases, after...);
}

// State of such a primitive besides its inputs.
struct WeightedState {
  QuantizedForm form;
  bool biased;
  bool transpose;  // whether it takes the transposed weights
  bool has_lhs = false, has_rhs = false;
  bool sorted = false;  // whether rhs rises: MLX's gradients of scales and biases then take another way

  WeightedState(const QuantizedWeights& weights, bool transposed)
      : form(weights), biased(weights.biases.has_value()), transpose(transposed) {}
  bool operator==(const WeightedState&) const = default;

  // That begin at an input.
  QuantizedWeights weights(const Arrays& inputs, int first = 1) const {
    return {form, inputs[first], inputs[first + 1], biased ? std::optional(inputs[first + 2]) : std::nullopt};
  }
  // Of the results.
  int columns(const Arrays& inputs) const {
    const QuantizedWeights in = weights(inputs);
    return transpose ? in.w.shape(-2) : in.inner();
  }
};

}  // namespace mlx_cuda
