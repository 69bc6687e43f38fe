// Grouped GEMMs, and matmuls of pairs of matrices, as in MoE.
#pragma once

#include "runtime/arrays.h"
#include "runtime/device_code.h"

#include <mlx/stream.h>

#include <optional>

namespace mlx_cuda {

// x [M, K] times the matrix of each row's group: the transposed ones of w [E, N, K], or with transpose = false those of w [E, K,
// N]. `offsets`, int32, say on the GPU which rows a group has: [E + 1], from one to the next, or [E], up to each. Rows of no group
// come out as zeros, and what offsets say is held to the rows that there are. x and w are of one type, float16 or bfloat16;
// no dimension but M is 0; sm_80 or newer.
mx::array grouped_matmul(
    const mx::array& x, const mx::array& w, const mx::array& offsets, bool transpose, const mx::Stream& stream);

// The gradient of weights [E, N, K]: for each of `groups` groups, y^T x over its rows of y [M, N] and x [M, K]. Types and offsets
// as above.
mx::array grouped_gradient(const mx::array& x, const mx::array& y, const mx::array& offsets, int groups, const mx::Stream& stream);

// The same, padded with zeros along an axis up to a multiple of 8: the vectors that kernels read of 16-bit numbers. Only the
// gradients of results of other widths need it for K.
mx::array in_units(const mx::array& in, int axis, const mx::Stream& stream);

// Where the rows of each of `groups` groups begin and the last one's end, int32 [groups + 1], from rising uint32 indices [rows].
mx::array expert_offsets(const mx::array& sorted_indices, int groups, const mx::Stream& stream);

// The matmuls [P, M, N] of pairs of a matrix of x [B, M, K] and one of w, as above: pair p has matrices lhs[p] and rhs[p], uint32
// [P]; without lhs, each matrix of x in turn has P / B pairs. `sorted`: rhs is ascending. Indices that are too large give zeros,
// or in lhs the last matrix. Types as above, and no dimension is 0.
mx::array gather_mm(
    const mx::array& x,
    const mx::array& w,
    const MaybeArray& lhs,
    const mx::array& rhs,
    bool transpose,
    bool sorted,
    const mx::Stream& stream);

// The matrices of an array that `gather_mm` has made of rows, and each row's matrix; none for any other array. x is one row, or
// has a row for each index.
struct GatheredRows {
  mx::array w;
  bool transpose;
  mx::array chosen;
};
std::optional<GatheredRows> gathered_rows(const mx::array& out);

// The kernels that compute these on the current GPU. The arrays need not be evaluated.
KernelName grouped_matmul_kernel(const mx::array& x, const mx::array& w, bool transpose);
KernelName gather_mm_kernel(const mx::array& x, const mx::array& w, const mx::array& rhs, bool transpose);

}  // namespace mlx_cuda
