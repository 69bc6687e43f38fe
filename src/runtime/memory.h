// Memory for outputs and workspaces, from MLX's own allocator.
#pragma once

#include "runtime/arrays.h"

#include <mlx/backend/cuda/device.h>
#include <mlx/stream.h>

#include <cstddef>
#include <cstdint>
#include <optional>

namespace mlx_cuda {

// Gives `out` new row-contiguous memory, ordered on the stream.
void allocate(mx::array& out, const mx::Stream& stream);

// Gives `out` new memory with the strides given (in elements), which must cover it densely.
void allocate(mx::array& out, const mx::Strides& strides, const mx::Stream& stream);

// An array that lives until the work encoded so far and next has run.
mx::array temporary(mx::Shape shape, mx::Dtype dtype, CommandEncoder& encoder, const mx::Stream& stream);

// The same, in memory that calls use in turns, two buffers on each stream of a thread: so that memory does not pile up when the
// host encodes ahead of the device. Readers name it as an output too, so that the next writer is ordered after them.
mx::array temporary_in_turn(mx::Shape shape, mx::Dtype dtype, CommandEncoder& encoder, const mx::Stream& stream);

// While there is one, this thread's temporaries are each its own: a captured graph may run on another stream.
class OwnTemporaries {
 public:
  OwnTemporaries();
  ~OwnTemporaries();
  OwnTemporaries(const OwnTemporaries&) = delete;
  OwnTemporaries& operator=(const OwnTemporaries&) = delete;
};

// Device memory that lives as long; null for 0 bytes.
void* workspace(std::size_t bytes, CommandEncoder& encoder, const mx::Stream& stream);

// Another array of the same memory, of which no more than `in` has is said: row-contiguous or not.
mx::array view(const mx::array& in, mx::Shape shape, const mx::Strides& strides, bool row_contiguous);
mx::array view(const mx::array& in, mx::Shape shape);  // row-contiguous, as `in` is

// Whether `contiguous_copy` takes this array: elements of 8, 16 or 32 bits and not too many dimensions.
bool can_copy(const mx::array& in);

// Whether an array's address is aligned to 16 bytes: MLX's allocator aligns up to 8 bytes to only 8. Arrays that are not
// evaluated are expected to be.
bool on_16_bytes(const mx::array& in);

// A row-contiguous copy on 16 bytes, which is kept alive until the stream has read it. It adds a node, so it comes before the
// inputs and outputs of the caller's own node are named.
mx::array contiguous_copy(const mx::array& in, CommandEncoder& encoder, const mx::Stream& stream);

// The array itself, if it is row-contiguous (and on 16 bytes), else such a copy.
mx::array contiguous(const mx::array& in, CommandEncoder& encoder, const mx::Stream& stream);
mx::array contiguous_on_16_bytes(const mx::array& in, CommandEncoder& encoder, const mx::Stream& stream);
MaybeArray contiguous(const MaybeArray& in, CommandEncoder& encoder, const mx::Stream& stream);
MaybeArray contiguous_on_16_bytes(const MaybeArray& in, CommandEncoder& encoder, const mx::Stream& stream);

// Whether the elements of every row (the last dimension) are adjacent.
bool elements_adjacent(const mx::array& in);

// Whether 16 bytes at a time can be read of every row (the last dimension): its elements adjacent, all rows on 16 bytes. Strides of
// 0 and negative ones are fine.
bool rows_readable(const mx::array& in);

// The array itself if its rows are so, or if the elements of its rows are adjacent, else a row-contiguous copy.
mx::array with_readable_rows(const mx::array& in, CommandEncoder& encoder, const mx::Stream& stream);
mx::array with_adjacent_elements(const mx::array& in, CommandEncoder& encoder, const mx::Stream& stream);

// The distance in elements between the rows (the last dimension) of an array seen as a matrix; none when its elements are not
// adjacent in a row, or its rows not evenly spaced. A broadcast row has distance 0.
std::optional<std::int64_t> row_distance(const mx::array& in);

// An array with such rows: itself, or a row-contiguous copy.
struct SpacedRows {
  mx::array array;
  std::int64_t distance;
};
SpacedRows with_spaced_rows(const mx::array& in, CommandEncoder& encoder, const mx::Stream& stream);

// "mlx" when outputs come from MLX's caching allocator, "pool" when from the driver's memory pool (see docs/internals/design.md).
const char* allocation_route(const mx::Stream& stream);

}  // namespace mlx_cuda
