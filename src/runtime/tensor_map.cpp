#include "runtime/tensor_map.h"

#include "runtime/status.h"

#include <mlx/backend/cuda/utils.h>

#include <array>
#include <cstdint>

namespace mlx_cuda {

namespace {

// Axes of an operand from the innermost, where the last may be missing.
struct Axes {
  std::array<std::uint64_t, 4> sizes;
  std::array<std::uint64_t, 3> strides;  // in bytes, of all but the innermost
};

Axes axes_of(const mx::array& in) {
  const bool packed = in.ndim() == 3;  // [total, H, D]
  const auto size = static_cast<std::uint64_t>(in.itemsize());
  const int head = 1;
  const int row = packed ? 0 : 2;
  const auto dim = static_cast<std::uint64_t>(in.shape(-1));
  // A dimension of one element may have any stride; the driver wants one that it likes.
  auto stride = [&](int axis) {
    return in.shape(axis) == 1 ? (dim * size + 15) / 16 * 16 : static_cast<std::uint64_t>(in.strides(axis)) * size;
  };
  auto extent = [&](int axis) { return static_cast<std::uint64_t>(in.shape(axis)); };
  return {
      {dim, extent(row), extent(head), packed ? 1 : extent(0)},
      {stride(row), stride(head), packed ? (dim * size + 15) / 16 * 16 : stride(0)}};
}

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

}  // namespace

bool copyable(const mx::array& in) {
  auto fits = [&](int axis) {
    const std::int64_t bytes = in.strides(axis) * static_cast<std::int64_t>(in.itemsize());
    return in.shape(axis) == 1 || (bytes > 0 && bytes % 16 == 0 && bytes < std::int64_t{1} << 40);
  };
  const bool outer = in.ndim() == 3 || fits(2);
  return (in.strides(-1) == 1 || in.shape(-1) == 1) && fits(0) && fits(1) && outer && in.offset() % 16 == 0;
}

CUtensorMap tensor_map(const mx::array& in, int rows) {
  return encode(in, axes_of(in), rows);
}

bool copyable_mask(const mx::array& mask) {
  // What is broadcast has a stride of 0 and is not moved along.
  auto fits = [&](int axis) {
    return mask.strides(axis) >= 0 && mask.strides(axis) * static_cast<std::int64_t>(mask.itemsize()) % 16 == 0;
  };
  return mask.strides(3) == 1 && fits(0) && fits(1) && fits(2) && mask.offset() % 16 == 0;
}

CUtensorMap mask_tensor_map(const mx::array& mask, int rows) {
  const auto size = static_cast<std::uint64_t>(mask.itemsize());
  auto moves = [&](int axis) { return mask.strides(axis) != 0; };
  auto extent = [&](int axis) { return moves(axis) ? static_cast<std::uint64_t>(mask.shape(axis)) : 1; };
  auto stride = [&](int axis) { return moves(axis) ? static_cast<std::uint64_t>(mask.strides(axis)) * size : 16; };
  const Axes axes{{static_cast<std::uint64_t>(mask.shape(3)), extent(2), extent(1), extent(0)}, {stride(2), stride(1), stride(0)}};
  return encode(mask, axes, moves(2) ? rows : 1);
}

}  // namespace mlx_cuda
