// The inputs of a recorded step, and what it leaves in its caches.
#include "decoding/params.h"

namespace mlx_cuda {

__device__ inline void begin(const BeginParams& p) {
  const int stride = 2 + 3 * p.batch;
  for (int i = threadIdx.x; i < p.count * stride; i += BeginParams::kThreads) {
    const Place& place = p.places[i / stride];
    const int field = i % stride - 2;
    const int* own = p.sequences + i / stride * 2 * p.batch;
    int value = field == -2 ? place.offset : place.row;
    if (field >= 0) {
      const int sequence = field % p.batch;
      const int which = field / p.batch;
      value = which == 0 ? place.offset + own[sequence] : which == 1 ? place.length : place.start + own[p.batch + sequence];
    }
    p.places_to[i] = value;
  }
  const char* from = static_cast<const char*>(p.tokens);
  char* to = static_cast<char*>(p.tokens_to);
  for (int i = threadIdx.x; i < p.batch * p.token_bytes; i += BeginParams::kThreads) {
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
  const char* from = static_cast<const char*>(p.rows[which]) + batch * p.distances[which][0] + head * p.distances[which][1];
  char* to = static_cast<char*>(p.caches[which]) +
             ((static_cast<long long>(batch) * p.heads + head) * p.capacity + p.place[1]) * p.row_bytes[which];
  reinterpret_cast<short*>(to)[index % halves] = reinterpret_cast<const short*>(from)[index % halves];
}

// Both lie on 16 bytes.
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

}  // namespace mlx_cuda

extern "C" __global__ void __launch_bounds__(mlx_cuda::BeginParams::kThreads)
    step_begin(const __grid_constant__ mlx_cuda::BeginParams params) {
  mlx_cuda::begin(params);
}

extern "C" __global__ void __launch_bounds__(mlx_cuda::AppendParams::kThreads)
    step_append(const __grid_constant__ mlx_cuda::AppendParams params) {
  mlx_cuda::append(params);
}

extern "C" __global__ void __launch_bounds__(mlx_cuda::ReplaceParams::kThreads)
    step_replace(const __grid_constant__ mlx_cuda::ReplaceParams params) {
  mlx_cuda::replace(params);
}
