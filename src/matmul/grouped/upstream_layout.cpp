#include "matmul/grouped/upstream_operand.h"

#include <utility>

namespace mlx_cuda {

namespace {

constexpr int kRead = 8;  // elements at once
constexpr std::uintptr_t kAlignment = 4 * kRead;

// Whether there is no gap, and no other order, from one element to the next.
bool dense(const mx::Shape& shape, const mx::Strides& strides) {
  std::int64_t expected = 1;
  for (int axis = static_cast<int>(shape.size()) - 1; axis >= 0; --axis) {
    if (shape[axis] != 1 && strides[axis] != expected) {
      return false;
    }
    expected *= shape[axis];
  }
  return true;
}

}  // namespace

OperandLayout layout_for_upstream(const mx::Shape& shape, const mx::Strides& strides, std::uintptr_t address, bool weights) {
  const std::size_t last = shape.size() - 1;
  const bool inner_units = shape[last - 1] % kRead == 0;
  const bool column_units = shape[last] % kRead == 0;
  const bool rows = !weights || column_units || !inner_units;
  const bool columns = weights && (inner_units || !column_units);
  const bool aligned = address % kAlignment == 0;
  if (rows && aligned && dense(shape, strides)) {
    return OperandLayout::rows;
  }
  mx::Shape turned_shape = shape;
  mx::Strides turned_strides = strides;
  std::swap(turned_shape[last], turned_shape[last - 1]);
  std::swap(turned_strides[last], turned_strides[last - 1]);
  if (columns && aligned && dense(turned_shape, turned_strides)) {
    return OperandLayout::columns;
  }
  return rows ? OperandLayout::copied_rows : OperandLayout::copied_columns;
}

}  // namespace mlx_cuda
