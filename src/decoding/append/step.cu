// The inputs of a captured step, and the update of its caches.
#include "decoding/append/params.h"
#include "decoding/append/quantized_row.cuh"
#include "device/kernel.cuh"
#include "device/ptx.cuh"
#include "device/types.cuh"
#include "device/vector.cuh"

namespace mlx_cuda {

// A number of a sequence with a paged KV cache, from this row of the tables, for a token with this position and start.
__device__ inline int in_pages(const BeginParams& p, int which, int sequence, int place, int start, int field) {
  if (sequence >= p.given || place < 0 || place >= p.columns * p.page_size) {
    return field == kPages ? -1 : 0;
  }
  const int* table = p.table + (which * p.batch + sequence) * p.columns;
  const int values[kPlaceFields] = {place, place + 1, start, table[place / p.page_size], place % p.page_size};
  return values[field];
}

__device__ inline void begin(const BeginParams& p) {
  const int stride = place_field(kPlaceFields, p.batch);
  for (int i = threadIdx.x; i < p.count * stride; i += BeginParams::kThreads) {
    const Place& place = p.places[i / stride];
    const int field = i % stride - 2;
    const int* own = p.sequences + i / stride * 2 * p.batch;
    int value = field == -2 ? place.offset : place.row;
    if (field >= 0) {
      const int sequence = field % p.batch;
      const int offset = place.offset + own[sequence];
      const int start = place.start + own[p.batch + sequence];
      const int values[kPlaceFields] = {offset, place.length, start, sequence, place.row};
      value = p.table ? in_pages(p, i / stride, sequence, offset, start, field / p.batch) : values[field / p.batch];
    }
    p.places_to[i] = value;
  }
  const char* from = static_cast<const char*>(p.tokens);
  char* to = static_cast<char*>(p.tokens_to);
  for (int i = threadIdx.x; i < p.count * p.batch * p.columns; i += BeginParams::kThreads) {
    p.table_to[i] = p.table[i];
  }
  for (int i = threadIdx.x; i < p.given * p.token_bytes; i += BeginParams::kThreads) {
    to[i] = from[i / p.token_bytes * p.token_distance + i % p.token_bytes];
  }
}

// Two bytes of every row at a time: the smallest number that keys and values are made of.
__device__ inline void append(const AppendParams& p) {
  const int which = blockIdx.y;
  const int halves = p.row_bytes[which] / 2;
  const int index = blockIdx.x * AppendParams::kThreads + threadIdx.x;
  if (index >= p.batch * p.heads * halves) {
    return;
  }
  const int head = index / halves % p.heads;
  const int batch = index / halves / p.heads;
  const int page = p.where[batch];
  if (page < 0) {
    return;
  }
  const char* from = static_cast<const char*>(p.rows[which]) + batch * p.distances[which][0] + head * p.distances[which][1];
  char* to = static_cast<char*>(p.caches[which]) +
             ((static_cast<long long>(page) * p.heads + head) * p.capacity + p.where[p.batch + batch]) * p.row_bytes[which];
  reinterpret_cast<short*>(to)[index % halves] = reinterpret_cast<const short*>(from)[index % halves];
}

// By a warp for each row.
template <typename T, int Bits>
__device__ inline void append_quantized(const QuantizedAppendParams& p) {
  begin_pdl();
  const int index = blockIdx.x * QuantizedAppendParams::kWarps + threadIdx.x / 32;
  const int rows = p.batch * p.heads;
  if (index >= 2 * rows) {
    return;
  }
  const int lane = threadIdx.x % 32;
  const int which = index / rows;
  const int batch = index % rows / p.heads;
  const int head = index % p.heads;
  const int page = p.where[batch];
  if (page < 0) {
    return;
  }
  const int values_each = p.to.dims[which] / 32;
  const T* from = static_cast<const T*>(p.rows[which]) + batch * p.distances[which][0] + head * p.distances[which][1];
  float values[kMostOfLane];
#pragma unroll
  for (int i = 0; i < kMostOfLane; ++i) {
    values[i] = i < values_each ? to_float(from[i * 32 + lane]) : 0.0f;
  }
  const long long row = (static_cast<long long>(page) * p.heads + head) * p.capacity + p.where[p.batch + batch];
  store_quantized<T, Bits>(p.to, which, row, values);
}

// Both are aligned to 16 bytes.
__device__ inline void replace(const ReplaceParams& p) {
  const long long bytes = p.bytes[blockIdx.y];
  const char* from = static_cast<const char*>(p.from[blockIdx.y]);
  char* to = static_cast<char*>(p.to[blockIdx.y]);
  const int thread = blockIdx.x * ReplaceParams::kThreads + threadIdx.x;
  for (long long i = thread; i < bytes / 16; i += gridDim.x * ReplaceParams::kThreads) {
    reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
  }
  if (thread < bytes % 16) {
    to[bytes / 16 * 16 + thread] = from[bytes / 16 * 16 + thread];
  }
}

MLX_CUDA_KERNEL(step_begin, (BeginParams::kThreads), BeginParams, begin)
MLX_CUDA_KERNEL(step_append, (AppendParams::kThreads), AppendParams, append)
MLX_CUDA_KERNEL(step_replace, (ReplaceParams::kThreads), ReplaceParams, replace)

#define MLX_CUDA_APPEND_QUANTIZED(name, dtype, BITS) \
  MLX_CUDA_KERNEL(name, (QuantizedAppendParams::kWarps * 32), QuantizedAppendParams, append_quantized<types::dtype, BITS>)
MLX_CUDA_STEP_APPEND_KERNELS(MLX_CUDA_APPEND_QUANTIZED)

}  // namespace mlx_cuda
