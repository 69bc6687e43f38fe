// NaN for the gradient of v where q or k has NaN or infinity. A query with a score that is not finite has probabilities that are
// all NaN, and so has the gradient of every value of its head. cuDNN 9.28 takes them for 0.
//
// A block looks at some rows of q, of all heads that share one of k, or of k. One that finds such a number overwrites the gradient
// of the whole head; that several may do that is no harm.
#include "attention/cudnn/lost_nan_params.h"

namespace mlx_cuda {

__device__ inline bool has_non_finite(uint4 eight, unsigned exponent) {
  const unsigned words[4] = {eight.x, eight.y, eight.z, eight.w};
  bool found = false;
#pragma unroll
  for (const unsigned word : words) {
    found = found || (word & exponent) == exponent || (word >> 16 & exponent) == exponent;
  }
  return found;
}

extern "C" __global__ void __launch_bounds__(kLostNanThreads) lost_nan(__grid_constant__ const LostNanParams p) {
  const int part = blockIdx.x % p.parts;
  const long long batch = blockIdx.x / p.parts / p.kv_heads;
  const int head = blockIdx.x / p.parts % p.kv_heads;
  const int units = p.head_dim / 8;
  const int of_q = p.shared * p.q.rows;
  bool found = false;
  for (int i = threadIdx.x; i < kLostNanRows * units; i += kLostNanThreads) {
    const int any = part * kLostNanRows + i / units;
    if (any < of_q + p.k.rows) {
      const bool is_q = any < of_q;
      const LostNanRows& in = is_q ? p.q : p.k;
      const long long from_head = is_q ? head * p.shared + any / p.q.rows : head;
      const long long row = in.first + (is_q ? any % p.q.rows : any - of_q);
      const auto* data = static_cast<const unsigned short*>(in.data) + batch * in.batch + from_head * in.head + row * in.row;
      found = found || has_non_finite(*reinterpret_cast<const uint4*>(data + i % units * 8), p.exponent);
    }
  }
  if (__syncthreads_or(found)) {
    auto* d_v = static_cast<unsigned short*>(p.d_v) + batch * p.d_v_batch + head * p.d_v_head;
    for (long long i = threadIdx.x; i < static_cast<long long>(p.kv_length) * p.v_head_dim; i += kLostNanThreads) {
      d_v[i / p.v_head_dim * p.d_v_row + i % p.v_head_dim] = 0x7fff;  // NaN, in both types
    }
  }
}

}  // namespace mlx_cuda
