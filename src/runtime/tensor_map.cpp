#include "runtime/tensor_map.h"

#include "runtime/memory.h"
#include "runtime/status.h"

#include <mlx/backend/cuda/utils.h>

#include <array>
#include <cstdint>

namespace mlx_cuda {

namespace {

constexpr std::int64_t kUnit = 16;  // bytes, of which strides are multiples

// Axes of an operand from the innermost. Of what has one element the stride is any that the driver takes.
struct Axes {
  std::array<std::uint64_t, 4> sizes{1, 1, 1, 1};
  std::array<std::uint64_t, 3> strides{kUnit, kUnit, kUnit};  // in bytes, of all but the innermost

  void set(int place, const mx::array& in, int axis) {
    sizes[place] = static_cast<std::uint64_t>(in.shape(axis));
    if (place > 0 && sizes[place] > 1) {
      strides[place - 1] = static_cast<std::uint64_t>(in.strides(axis)) * in.itemsize();
    }
  }
};

CUtensorMap encode(const mx::array& in, const Axes& axes, int rows) {
  const std::array<std::uint32_t, 4> box{64, static_cast<std::uint32_t>(rows), 1, 1};
  const std::array<std::uint32_t, 4> steps{1, 1, 1, 1};
  const auto type = in.dtype() == mx::float16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  CUtensorMap map;
  MLX_CUDA_CHECK(cuTensorMapEncodeTiled(
      &map, type, 4, const_cast<void*>(mx::gpu_ptr<void>(in)), axes.sizes.data(), axes.strides.data(), box.data(), steps.data(),
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
  return map;
}

std::int64_t stride_bytes(const mx::array& in, int axis) {
  return in.strides(axis) * static_cast<std::int64_t>(in.itemsize());
}

}  // namespace

CUtensorMap matrix_tensor_map(const mx::array& in, int rows) {
  Axes axes;
  for (int place = 0; place < static_cast<int>(in.ndim()); ++place) {
    axes.set(place, in, -1 - place);
  }
  return encode(in, axes, rows);
}

bool copyable(const mx::array& in) {
  auto fits = [&](int axis) {
    const std::int64_t bytes = stride_bytes(in, axis);
    return in.shape(axis) == 1 || (bytes > 0 && bytes % kUnit == 0 && bytes < std::int64_t{1} << 40);
  };
  const bool outer = in.ndim() == 3 || fits(2);
  return elements_adjacent(in) && fits(0) && fits(1) && outer && on_16_bytes(in);
}

CUtensorMap tensor_map(const mx::array& in, int rows) {
  const bool packed = in.ndim() == 3;  // [total, H, D]
  Axes axes;
  axes.set(0, in, -1);
  axes.set(1, in, packed ? 0 : 2);
  axes.set(2, in, 1);
  if (!packed) {
    axes.set(3, in, 0);
  }
  return encode(in, axes, rows);
}

bool copyable_mask(const mx::array& mask) {
  // A broadcast dimension has a stride of 0 and no coordinate.
  auto fits = [&](int axis) { return mask.strides(axis) >= 0 && stride_bytes(mask, axis) % kUnit == 0; };
  return mask.strides(3) == 1 && fits(0) && fits(1) && fits(2) && on_16_bytes(mask);
}

CUtensorMap mask_tensor_map(const mx::array& mask, int rows) {
  auto moves = [&](int axis) { return mask.strides(axis) != 0; };
  Axes axes;
  axes.set(0, mask, 3);
  for (int place = 1; place < 4; ++place) {
    if (moves(3 - place)) {
      axes.set(place, mask, 3 - place);
    }
  }
  return encode(mask, axes, moves(2) ? rows : 1);
}

}  // namespace mlx_cuda
