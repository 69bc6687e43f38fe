#include "matmul/fp8/fp8.h"
#include "matmul/fp8/params.h"
#include "runtime/device_code.h"
#include "runtime/kernel_table.h"
#include "runtime/memory.h"
#include "runtime/node.h"

#include <mlx/ops.h>

#include <algorithm>
#include <bit>
#include <memory>
#include <stdexcept>
#include <vector>

namespace mlx_cuda {

namespace {

constexpr int kBlock = Fp8Shape::kBlock;
constexpr int kThreads = Fp8Shape::kThreads;

KernelModule kernels("fp8");
#define MLX_CUDA_FP8_ROW(name, dtype, vector, kernel) {#name, {#dtype, vector, #kernel}},
constexpr auto kKernels =
    std::to_array<KernelRow<std::string_view, bool, std::string_view>>({MLX_CUDA_FP8_KERNELS(MLX_CUDA_FP8_ROW)});

class QuantizeFp8 final : public Stateful<Fp8Part> {
 public:
  using Stateful::Stateful;
  DEFINE_NAME(QuantizeFp8)

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    const mx::Shape& shape = inputs[0].shape();
    mx::Shape scales = shape;
    scales.back() = state_ == Fp8Part::row ? 1 : ceil_div(shape.back(), kBlock);
    if (state_ == Fp8Part::tile) {
      scales[0] = ceil_div(shape[0], kBlock);
    }
    return {shape, state_ == Fp8Part::tensor ? mx::Shape{1} : scales};
  }

  std::pair<Arrays, std::vector<int>> vmap(const Arrays& inputs, const std::vector<int>& axes) override {
    const auto s = queue();
    const mx::array x = mx::moveaxis(inputs[0], axes[0], 0, s);
    if (state_ == Fp8Part::tensor) {  // each entry is a row then
      auto [rows, of_rows] = quantize_fp8(mx::flatten(mx::expand_dims(x, -1, s), 1, -1, s), Fp8Part::row, s);
      return {{mx::reshape(rows, x.shape(), s), of_rows}, {0, 0}};
    }
    if (state_ != Fp8Part::tile) {
      auto [all, of_all] = quantize_fp8(x, state_, s);
      return {{all, of_all}, {0, 0}};
    }
    Arrays values;
    Arrays scales;
    for (int i = 0; i < x.shape(0); ++i) {
      auto [one, of_one] = quantize_fp8(mx::take(x, i, 0, s), state_, s);
      values.push_back(one);
      scales.push_back(of_one);
    }
    return {{mx::stack(values, 0, s), mx::stack(scales, 0, s)}, {0, 0}};
  }

 protected:
  bool is_composable() const override {
    return false;
  }

  // The input is a constant for gradients.
  Arrays compose(const Arrays&) const override {
    throw std::runtime_error("[quantize_fp8] FP8 values have no gradients.");
  }

  void encode(const Arrays& inputs, Arrays& outputs, CommandEncoder& encoder) override {
    const auto [x, distance] = with_spaced_rows(inputs[0], encoder, stream());
    mx::array& values = outputs[0];
    mx::array& scales = outputs[1];
    long long columns = x.shape(-1);
    long long rows = static_cast<long long>(x.size()) / columns;
    allocate(values, stream());
    allocate_scales(scales, rows);
    const bool one_row = state_ == Fp8Part::tensor && distance == columns;
    if (one_row) {
      columns *= rows;
      rows = 1;
    }

    long long width = 16 / static_cast<long long>(x.itemsize());
    const bool wide = columns % width == 0 && (rows == 1 || distance % width == 0) && on_16_bytes(x);
    if (!wide) {
      width = 1;
    }
    const std::string dtype = type_name(x.dtype());
    const Fp8Matrix<void> in{mx::gpu_ptr<void>(x), rows, columns, distance};
    KernelNode node(encoder);
    auto launch = [&](const char* kernel, dim3 grid, unsigned threads, auto... more) {
      node.reads(x);
      void* to = node.writes(values);
      void* scale = node.writes(scales);
      node.launch(kernels.function(kernel_for(kKernels, dtype, wide, kernel)), grid, threads, 0, in, to, scale, more...);
    };
    const long long blocks = ceil_div<long long>(columns, kBlock);
    switch (state_) {
      case Fp8Part::row:
        if (columns <= 32 * width * Fp8Shape::kKept) {
          launch("fp8_short_rows", dim3(ceil_div(rows, kThreads / 32)), kThreads);
        } else {
          const auto threads = std::clamp(ceil_div(ceil_div(columns, width * Fp8Shape::kKept), 32) * 32, 64LL, 1LL * kThreads);
          launch("fp8_rows", dim3(rows), threads);
        }
        break;
      case Fp8Part::block: {
        const long long groups = kThreads / (wide ? kBlock / width : 32);
        const auto across = static_cast<int>(std::min<long long>(groups, std::bit_ceil(static_cast<unsigned long long>(blocks))));
        const long long down = groups / across * (wide ? Fp8Shape::kBlockRows : 1);
        launch("fp8_blocks", dim3(ceil_div(rows, down), ceil_div(blocks, across)), kThreads, across);
        break;
      }
      case Fp8Part::tile:
        launch("fp8_tiles", dim3(blocks, ceil_div(rows, kBlock)), kThreads);
        break;
      case Fp8Part::tensor: {
        const long long most = 8LL * multiprocessors();
        const long long across = std::min(ceil_div(columns, Fp8Shape::kTogether * kThreads * width), most);
        const long long down = std::clamp(most / across, 1LL, rows);
        const auto partials = static_cast<int>(across * down);
        void* partial = workspace(static_cast<std::size_t>(partials) * sizeof(float), encoder, stream());
        const dim3 grid(across, down);
        // The scale is written by the second kernel alone, but naming it orders the two.
        node.reads(x);
        node.writes(scales);
        node.launch(kernels.function(kernel_for(kKernels, dtype, wide, "fp8_largest")), grid, kThreads, 0, in, partial);
        node.reads(scales);
        launch("fp8_tensor", grid, kThreads, partial, partials);
        break;
      }
    }
  }

 private:
  // As cuBLASLt reads the scales of blocks: those of all rows together.
  void allocate_scales(mx::array& scales, long long rows) {
    if (state_ != Fp8Part::block) {
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
