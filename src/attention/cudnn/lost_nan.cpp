#include "attention/cudnn/lost_nan.h"

#include "attention/cudnn/lost_nan_params.h"
#include "runtime/device_code.h"
#include "runtime/node.h"

#include <cudnn.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace mlx_cuda {

namespace {

KernelModule kernels("lost_nan");

constexpr std::size_t kLastKnownRight = 91999;  // 9.19 and its patches
constexpr unsigned kExponentOfHalf = 0x7c00, kExponentOfBfloat = 0x7f80;

}  // namespace

bool loses_nan() {
  return cudnnGetVersion() > kLastKnownRight;
}

void restore_nan(
    const SdpaBackwardProblem& problem, const mx::array& q, const mx::array& k, mx::array& d_v, CommandEncoder& encoder) {
  const SdpaProblem& of = problem.forward;
  KernelNode node(encoder);
  auto rows = [&](const mx::array& in, const SdpaProblem::Strides& strides, std::int64_t first, std::int64_t all) {
    first = std::clamp<std::int64_t>(first, 0, all);
    return LostNanRows{node.reads(in), strides.batch,           strides.head,
                       strides.row,    static_cast<int>(first), static_cast<int>(all - first)};
  };
  // Queries that see no keys, and keys that no query sees, do not matter.
  const std::int64_t fewer_queries = of.kv_length - of.q_length;
  LostNanParams p{};
  p.q = rows(q, of.q, of.causal ? -fewer_queries : 0, of.q_length);
  p.k = rows(k, of.k, of.window_left < 0 ? 0 : fewer_queries - of.window_left, of.kv_length);
  p.d_v = node.writes(d_v);
  p.d_v_batch = problem.d_v.batch;
  p.d_v_head = problem.d_v.head;
  p.d_v_row = problem.d_v.row;
  p.kv_heads = static_cast<int>(of.kv_heads);
  p.shared = static_cast<int>(of.heads / of.kv_heads);
  p.head_dim = static_cast<int>(of.head_dim);
  p.v_head_dim = static_cast<int>(of.v_head_dim);
  p.kv_length = static_cast<int>(of.kv_length);
  p.parts = ceil_div(p.shared * p.q.rows + p.k.rows, kLostNanRows);
  p.exponent = of.dtype == mx::float16 ? kExponentOfHalf : kExponentOfBfloat;
  node.launch(kernels.function("lost_nan"), dim3(p.parts * of.batch * of.kv_heads), kLostNanThreads, 0, p);
}

}  // namespace mlx_cuda
