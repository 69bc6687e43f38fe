// Quantised weights, as the primitives that read them have them.
#pragma once

#include "runtime/fused.h"

#include <mlx/backend/cuda/utils.h>

#include <bit>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace mlx_cuda {

// A matrix [rows, inner] or a stack of them, [..., rows, inner]: `w` has the values packed into uint32, `scales` one scale for each
// group of them along inner. With mode "affine" the values are integers of `bits` bits, and there are `biases`; scales and biases
// have the dtype of the results. The others have floats of 4 or 8 bits, and scales as bytes.
struct QuantizedWeights {
  mx::array w;
  mx::array scales;
  std::optional<mx::array> biases;
  int group_size;
  int bits;
  std::string mode;

  int inner() const {
    return static_cast<int>(static_cast<std::int64_t>(w.shape(-1)) * 32 / bits);
  }
};

// Weights in layouts that the kernels read, and the distances in bytes.
struct Readable {
  QuantizedWeights weights;
  std::int64_t w_distance;
  std::int64_t row_bytes;
  std::int64_t scale_distance;
};

// `adjacent`: rows of w have to follow one another. `alignment`: bytes on which they have to lie. Copies what does not fit.
Readable readable(
    QuantizedWeights weights, bool adjacent, int alignment, mx::cu::CommandEncoder& encoder, const mx::Stream& stream);

// Whether an array, and what lies `distance` elements apart in it, lies on that many bytes.
bool is_aligned(const mx::array& in, std::int64_t distance, int bytes);

// As kernels are named after it: "affine4", "mxfp4", ...
std::string format_name(const QuantizedWeights& weights);

inline int divide_up(std::int64_t value, std::int64_t by) {
  return static_cast<int>((value + by - 1) / by);
}

// Names the arrays as inputs of the next node.
void name_inputs(const QuantizedWeights& weights, mx::cu::CommandEncoder& encoder);

// Adds the arrays to the inputs of a primitive, in the order in which Weighted expects them.
void append_inputs(std::vector<mx::array>& inputs, const QuantizedWeights& weights);

// What kernels are told of them.
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

// Quantised weights as inputs of a primitive that has `before` inputs in front of them.
class Weighted : public Fused {
 public:
  Weighted(const mx::Stream& stream, const QuantizedWeights& weights)
      : Fused(stream),
        biased_(weights.biases.has_value()),
        group_size_(weights.group_size),
        bits_(weights.bits),
        mode_(weights.mode) {}

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& that = static_cast<const Weighted&>(other);
    return biased_ == that.biased_ && group_size_ == that.group_size_ && bits_ == that.bits_ && mode_ == that.mode_;
  }

  // Of what is asked for only: packed weights have no derivative.
  std::vector<mx::array> vjp(
      const std::vector<mx::array>& primals,
      const std::vector<mx::array>& cotangents,
      const std::vector<int>& argnums,
      const std::vector<mx::array>& outputs) override;

 protected:
  QuantizedWeights weights(const std::vector<mx::array>& inputs, std::size_t before) const {
    const auto biases = biased_ ? std::optional(inputs[before + 2]) : std::nullopt;
    return {inputs[before], inputs[before + 1], biases, group_size_, bits_, mode_};
  }

  std::size_t count() const {
    return biased_ ? 3 : 2;
  }

 private:
  bool biased_;
  int group_size_;
  int bits_;
  std::string mode_;
};

}  // namespace mlx_cuda
