// Quantised weights, as the primitives that read them have them.
#pragma once

#include "runtime/fused.h"

#include <mlx/backend/cuda/utils.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
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

// `adjacent`: rows of w have to follow one another. `alignment`: bytes on which they have to lie. Copies what does not fit.
Readable readable(
    QuantizedWeights weights, bool adjacent, int alignment, mx::cu::CommandEncoder& encoder, const mx::Stream& stream);

// Bytes on which rows lie for kernels that read chunks of 32 values or 16 bytes, or pieces of 8 values.
int chunk_alignment(int bits);
int piece_alignment(int bits);

// Whether the scales of QuantizedProduct::kScaleRange values can be read at once, once `readable` has made of them what it does.
bool scales_are_wide(const QuantizedWeights& weights);

// Whether an array, and what lies `distance` elements apart in it, lies on that many bytes.
bool is_aligned(const mx::array& in, std::int64_t distance, int bytes);

// As kernels are named after it: "affine4", "mxfp4", ...
std::string format_name(const QuantizedWeights& weights);

inline int divide_up(std::int64_t value, std::int64_t by) {
  return static_cast<int>((value + by - 1) / by);
}

// Names the arrays as inputs of the next node.
void name_inputs(const QuantizedWeights& weights, mx::cu::CommandEncoder& encoder);

// The result of a primitive that has one: its inputs are those `before`, the weights, and those of `after` that are there.
mx::array result_of(
    std::shared_ptr<mx::Primitive> primitive,
    mx::Dtype dtype,
    std::vector<mx::array> before,
    const QuantizedWeights& weights,
    const std::vector<std::optional<mx::array>>& after = {});

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

// A primitive that has `before` inputs and then quantised weights, of which it takes the transposed ones or not.
class Weighted : public Fused {
 public:
  Weighted(const mx::Stream& stream, const QuantizedWeights& weights, std::size_t before, bool transpose)
      : Fused(stream),
        transpose_(transpose),
        before_(before),
        biased_(weights.biases.has_value()),
        group_size_(weights.group_size),
        bits_(weights.bits),
        mode_(weights.mode) {}

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& that = static_cast<const Weighted&>(other);
    return transpose_ == that.transpose_ && biased_ == that.biased_ && group_size_ == that.group_size_ && bits_ == that.bits_ &&
           mode_ == that.mode_;
  }

  // Of what is asked for only: packed weights have no derivative.
  std::vector<mx::array> vjp(
      const std::vector<mx::array>& primals,
      const std::vector<mx::array>& cotangents,
      const std::vector<int>& argnums,
      const std::vector<mx::array>& outputs) override;

 protected:
  QuantizedWeights weights(const std::vector<mx::array>& inputs) const {
    const auto biases = biased_ ? std::optional(inputs[before_ + 2]) : std::nullopt;
    return {inputs[before_], inputs[before_ + 1], biases, group_size_, bits_, mode_};
  }

  // Where the inputs behind the weights begin.
  std::size_t after() const {
    return before_ + (biased_ ? 3 : 2);
  }

  // Of the results.
  int columns(const QuantizedWeights& in) const {
    return transpose_ ? in.w.shape(-2) : in.inner();
  }

  bool transpose_;

 private:
  std::size_t before_;
  bool biased_;
  int group_size_;
  int bits_;
  std::string mode_;
};

}  // namespace mlx_cuda
