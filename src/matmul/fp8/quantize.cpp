#include "matmul/fp8/fp8.h"
#include "runtime/device_code.h"
#include "runtime/memory.h"

#include <mlx/backend/cuda/utils.h>
#include <mlx/ops.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

namespace mlx_cuda {

namespace {

constexpr int kBlock = 128;
constexpr int kThreads = 256;

// mlx_cuda::Matrix of matmul/fp8/fp8.cu.
struct Matrix {
  const void* data;
  long long rows, columns, stride;
};

KernelModule& kernels() {
  static KernelModule module("fp8");
  return module;
}

template <typename T>
T over(T value, T divisor) {
  return (value + divisor - 1) / divisor;
}

unsigned count(long long blocks) {
  return static_cast<unsigned>(blocks);
}

class QuantizeFp8 final : public Fused {
 public:
  QuantizeFp8(const mx::Stream& stream, Fp8Part part) : Fused(stream), part_(part) {}

  const char* name() const override {
    return "QuantizeFp8";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    return part_ == static_cast<const QuantizeFp8&>(other).part_;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    const mx::Shape& shape = inputs[0].shape();
    mx::Shape scales = shape;
    scales.back() = part_ == Fp8Part::row ? 1 : over(shape.back(), kBlock);
    if (part_ == Fp8Part::tile) {
      scales[0] = over(shape[0], kBlock);
    }
    return {shape, part_ == Fp8Part::tensor ? mx::Shape{1} : scales};
  }

  std::pair<std::vector<mx::array>, std::vector<int>> vmap(
      const std::vector<mx::array>& inputs, const std::vector<int>& axes) override {
    const auto s = queue();
    const mx::array x = mx::moveaxis(inputs[0], axes[0], 0, s);
    std::vector<mx::array> values;
    std::vector<mx::array> scales;
    if (part_ == Fp8Part::tensor) {  // each entry is a row then
      auto [rows, of_rows] = quantize_fp8(mx::flatten(mx::expand_dims(x, -1, s), 1, -1, s), Fp8Part::row, s);
      return {{mx::reshape(rows, x.shape(), s), of_rows}, {0, 0}};
    }
    if (part_ != Fp8Part::tile) {
      auto [all, of_all] = quantize_fp8(x, part_, s);
      return {{all, of_all}, {0, 0}};
    }
    for (int i = 0; i < x.shape(0); ++i) {
      auto [one, of_one] = quantize_fp8(mx::take(x, i, 0, s), part_, s);
      values.push_back(one);
      scales.push_back(of_one);
    }
    return {{mx::stack(values, 0, s), mx::stack(scales, 0, s)}, {0, 0}};
  }

 protected:
  // Nothing asks for it: the input is a constant to derivatives.
  std::vector<mx::array> compose(const std::vector<mx::array>&) const override {
    throw std::runtime_error("[quantize_fp8] Codes have no derivatives.");
  }

  void encode(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs, mx::cu::CommandEncoder& encoder) override {
    mx::array x = inputs[0];
    auto distance = row_distance(x);
    if (!distance) {
      x = contiguous_copy(x, encoder, stream());
      distance = x.shape(-1);
    }
    mx::array& values = outputs[0];
    mx::array& scales = outputs[1];
    long long columns = x.shape(-1);
    long long rows = static_cast<long long>(x.size()) / columns;
    allocate(values, stream());
    allocate_scales(scales, rows);
    const bool one_row = part_ == Fp8Part::tensor && *distance == columns;
    if (one_row) {
      columns *= rows;
      rows = 1;
    }

    const void* data = mx::gpu_ptr<void>(x);
    long long width = 16 / static_cast<long long>(x.itemsize());
    const bool wide =
        columns % width == 0 && (rows == 1 || *distance % width == 0) && reinterpret_cast<std::uintptr_t>(data) % 16 == 0;
    if (!wide) {
      width = 1;
    }
    Matrix in{data, rows, columns, *distance};
    void* to = mx::gpu_ptr<void>(values);
    void* scale = mx::gpu_ptr<void>(scales);
    const std::string name = std::string("_") + type_name(x.dtype()) + (wide ? "_vector" : "_scalar");
    auto launch = [&](const char* kernel, dim3 grid, unsigned threads, auto&... arguments) {
      encoder.add_kernel_node_ex(kernels().function(kernel + name), grid, dim3(threads), dim3(), 0, in, arguments...);
    };
    auto name_arrays = [&] {
      encoder.set_input_array(x);
      encoder.set_output_array(values);
      encoder.set_output_array(scales);
    };
    const long long blocks = over<long long>(columns, kBlock);
    switch (part_) {
      case Fp8Part::row: {
        constexpr long long kept = 4;  // vectors of a thread
        name_arrays();
        if (columns <= 32 * width * kept) {
          launch("fp8_short_rows", dim3(count(over<long long>(rows, kThreads / 32))), kThreads, to, scale);
        } else {
          const auto threads = std::clamp(over(over(columns, width * kept), 32LL) * 32, 64LL, 1LL * kThreads);
          launch("fp8_rows", dim3(count(rows)), count(threads), to, scale);
        }
        break;
      }
      case Fp8Part::block: {
        const long long groups = kThreads / (wide ? kBlock / width : 32);
        auto across = static_cast<int>(std::min<long long>(groups, std::bit_ceil(static_cast<unsigned long long>(blocks))));
        const long long down = groups / across * (wide ? 4 : 1);
        name_arrays();
        launch("fp8_blocks", dim3(count(over(rows, down)), count(over<long long>(blocks, across))), kThreads, to, scale, across);
        break;
      }
      case Fp8Part::tile:
        name_arrays();
        launch("fp8_tiles", dim3(count(blocks), count(over<long long>(rows, kBlock))), kThreads, to, scale);
        break;
      case Fp8Part::tensor: {
        const long long most = 8LL * multiprocessors();
        const long long across = std::min(over(columns, 4 * kThreads * width), most);
        const long long down = std::clamp(most / across, 1LL, rows);
        auto partials = static_cast<int>(across * down);
        void* partial = workspace(static_cast<std::size_t>(partials) * sizeof(float), encoder, stream());
        const dim3 grid(count(across), count(down));
        // The scale is written by the second kernel alone, but naming it orders the two.
        encoder.set_input_array(x);
        encoder.set_output_array(scales);
        launch("fp8_largest", grid, kThreads, partial);
        encoder.set_input_array(x);
        encoder.set_input_array(scales);
        encoder.set_output_array(values);
        encoder.set_output_array(scales);
        launch("fp8_tensor", grid, kThreads, to, scale, partial, partials);
        break;
      }
    }
  }

 private:
  // As cuBLASLt reads the scales of blocks: those of all rows together.
  void allocate_scales(mx::array& scales, long long rows) {
    if (part_ != Fp8Part::block) {
      allocate(scales, stream());
      return;
    }
    mx::Strides strides(scales.ndim(), 1);
    for (int axis = static_cast<int>(scales.ndim()) - 3; axis >= 0; --axis) {
      strides[axis] = strides[axis + 1] * scales.shape(axis + 1);
    }
    strides.back() = rows;
    allocate(scales, strides, stream());
  }

  Fp8Part part_;
};

}  // namespace

std::pair<mx::array, mx::array> quantize_fp8(const mx::array& x, Fp8Part part, const mx::Stream& stream) {
  if (!can_copy(x)) {  // the leading dimensions are rows anyway
    auto [values, scales] = quantize_fp8(mx::flatten(x, 0, -2, stream), part, stream);
    const mx::Shape leading(x.shape().begin(), x.shape().end() - 1);
    values = mx::unflatten(values, 0, leading, stream);
    return {values, part == Fp8Part::tensor ? scales : mx::unflatten(scales, 0, leading, stream)};
  }
  const mx::array in = x.is_tracer() ? mx::stop_gradient(x, stream) : x;
  auto primitive = std::make_shared<QuantizeFp8>(stream, part);
  auto results = mx::array::make_arrays(primitive->output_shapes({in}), {mx::uint8, mx::float32}, primitive, {in});
  return {results[0], results[1]};
}

}  // namespace mlx_cuda
