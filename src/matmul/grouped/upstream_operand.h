// How MLX's own gather_mm has to find its operands in memory.
//
// On CUDA MLX 0.32.4 takes a stack of matrices for one of two layouts, row after row or column after column, by the strides of its
// last two axes alone. An axis of one element may have any stride, so an inserted axis is taken for a row pitch of 1, and the rows
// of a slice for columns; a step between matrices is not looked at. Where K is a multiple of 8 its kernel reads 8 elements at once
// along whichever axis is adjacent, whatever the length of that axis and the address. The results are wrong, or the process is lost
// to a misaligned address.
#pragma once

#include "runtime/arrays.h"

#include <mlx/stream.h>

#include <cstdint>

namespace mlx_cuda {

// Row-major or column-major: the array itself, or a copy.
enum class OperandLayout { rows, columns, copied_rows, copied_columns };

// Which layouts MLX's gather_mm reads correctly, of a stack [..., rows, columns] at an address. Weights are the right operand,
// which may be column-major; they must be read correctly by the kernel of the result and by that of the gradient, whose K is this
// one's N.
OperandLayout layout_for_upstream(const mx::Shape& shape, const mx::Strides& strides, std::uintptr_t address, bool weights);

// The same matrices, in such a layout once they are evaluated. The gradient of operands that are no weights gets one as well.
mx::array upstream_operand(const mx::array& in, bool weights, const mx::Stream& stream);

}  // namespace mlx_cuda
