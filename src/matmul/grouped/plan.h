// The nodes of grouped GEMMs, for the primitives that use them.
#pragma once

#include "runtime/arrays.h"
#include "runtime/device_code.h"

#include <mlx/backend/cuda/device.h>
#include <mlx/stream.h>

namespace mlx_cuda {

// Rows sorted by group. The contents of these arrays are known only on the GPU.
struct GroupedRows {
  mx::array x;          // [rows, depth], float16 or bfloat16
  mx::array offsets;    // int32: where groups begin and the last one ends, or only where they end
  MaybeArray out_rows;  // int32 [rows]: the position of each result; none: its own
  bool has_begin;
};

// Matrices [count, columns, depth] or, not transposed, [count, depth, columns], with adjacent elements in the last dimension.
struct GroupedWeights {
  mx::array array;
  bool not_transposed;

  int columns() const {
    return array.shape(not_transposed ? 2 : 1);
  }
};

// [count, columns, depth], or with transpose = false [count, depth, columns], of any strides, as the kernels read it. It is copied
// only if rows of neither dimension begin on 16 bytes although they could.
GroupedWeights as_weights(const mx::array& w, bool transpose, CommandEncoder& encoder, const mx::Stream& stream);

// The same for rows.
mx::array as_rows(const mx::array& x, CommandEncoder& encoder, const mx::Stream& stream);

// Pairs of a matrix of x [matrices, matrix_rows, depth] (row-contiguous, any leading dimensions) and one of the weights. `lhs`
// and `rhs`: uint32, contiguous; without lhs, all matrices in turn have equally many pairs.
struct GatherPairs {
  mx::array x;
  MaybeArray lhs;
  mx::array rhs;

  int count() const {
    return static_cast<int>(rhs.size());
  }
  int rows() const {
    return count() * x.shape(-2);
  }
};

// The rows of pairs by group; sorted: rhs rises.
GroupedRows group_rows(const GatherPairs& pairs, int groups, bool sorted, CommandEncoder& encoder, const mx::Stream& stream);

// Adds the node that writes `offsets`, int32 [groups + 1], of rising uint32 indices of matrices of `matrix_rows` rows, contiguous.
void encode_offsets(const mx::array& indices, int matrix_rows, int groups, mx::array& offsets, CommandEncoder& encoder);

// Adds the node that writes rows of `out` [.., columns] (allocated, row-contiguous): those of all of `groups` groups, or, with a
// smaller number of matrices than that, those of the groups from `first` on, whose matrices they are. The launches of all groups
// together write every row: with zeros, where it belongs to no group.
void encode_grouped(
    const GroupedRows& rows, const GroupedWeights& weights, int first, int groups, mx::array& out, CommandEncoder& encoder);

// Adds the node that writes out [groups, y's columns, x's columns]: y^T x over the rows of each group.
void encode_grouped_gradient(const GroupedRows& rows, const mx::array& y, int groups, mx::array& out, CommandEncoder& encoder);

// Adds the node that writes out [pairs, matrix_rows, columns], each row from the weights of its pair: for few pairs.
void encode_gather_mv(const GatherPairs& pairs, const GroupedWeights& weights, mx::array& out, CommandEncoder& encoder);

// Whether the kernels read weights, of which only layout and dtype are looked at, as not transposed.
bool is_read_not_transposed(const mx::array& w, bool transpose);

// Whether rows of pairs are so few that they are better multiplied one by one.
bool is_gather_mv(int rows, int groups, bool not_transposed);

KernelName gather_mv_kernel(mx::Dtype dtype);
KernelName grouped_kernel(int rows, int groups, int columns, bool not_transposed, mx::Dtype dtype);

}  // namespace mlx_cuda
