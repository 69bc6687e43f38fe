#include "attention/cudnn/problem.h"

#include "runtime/device_code.h"
#include "runtime/memory.h"

#include <cstdint>

namespace mlx_cuda {

namespace {

using Strides = SdpaProblem::Strides;

Strides contiguous_strides(const mx::Shape& shape) {
  const std::int64_t row = shape[3];
  return {shape[1] * shape[2] * row, shape[2] * row, row};
}

// cuDNN wants head_dim adjacent and every row on 16 bytes; it has no word on strides of 0, and no room for negative ones.
bool can_read(const mx::array& in) {
  auto fits = [&](int axis) {
    return in.shape(axis) == 1 || (in.strides(axis) > 0 && (in.strides(axis) * in.itemsize()) % 16 == 0);
  };
  return elements_adjacent(in) && fits(0) && fits(1) && fits(2);
}

// Whether cuDNN's backward pass needs the number of keys. That for Hopper takes two tiles of 64 keys at a time and, if their
// number is odd, takes the second of the last two for keys whose scores are 0 (seen with 9.19; NVIDIA/cudnn-frontend#628). The
// exponentials of 0 - lse overflow if lse is below -88 (-11 in float16), and the gradient of q is NaN.
bool forgets_the_end(const SdpaProblem& problem) {
  constexpr int tile = 64;
  const bool hopper = device_attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) == 9;  // even if another is named
  return hopper && !problem.causal && problem.kv_length % (2 * tile) == tile;
}

// Projections leave [B, T, H, D] behind, which attention sees transposed.
bool rows_first(const mx::array& in) {
  const std::int64_t heads = in.shape(1);
  const std::int64_t dim = in.shape(3);
  return in.shape(2) > 1 && heads > 1 && in.strides(1) == dim && in.strides(2) >= heads * dim;
}

}  // namespace

SdpaProblem make_problem(const AttentionArrays& in, const AttentionOptions& options) {
  const auto& [q, k, v, table, mask, starts, ends, sinks] = in;
  mx::Shape out = q.shape();
  out[3] = v.shape(3);
  return {
      .dtype = q.dtype(),
      .batch = q.shape(0),
      .heads = q.shape(1),
      .kv_heads = k.shape(1),
      .q_length = q.shape(2),
      .kv_length = k.shape(2),
      .head_dim = q.shape(3),
      .v_head_dim = v.shape(3),
      .scale = options.scale,
      .causal = options.window_right == 0,
      .window_left = options.window_left,
      .sinks = sinks.has_value(),
      .stats = options.lse,
      .q = contiguous_strides(q.shape()),
      .k = contiguous_strides(k.shape()),
      .v = contiguous_strides(v.shape()),
      .out = contiguous_strides(out),
  };
}

SdpaBackwardProblem make_backward_problem(const AttentionArrays& in, const AttentionOptions& options) {
  const SdpaProblem forward = make_problem({in.q, in.k, in.v}, options.with_lse(true));
  return {
      .forward = forward,
      .deterministic = options.deterministic,
      .lengths_given = forgets_the_end(forward),
      .d_out = forward.out,
      .d_q = forward.q,
      .d_k = forward.k,
      .d_v = forward.v,
  };
}

mx::array readable(const mx::array& in, bool dense, CommandEncoder& encoder, const mx::Stream& stream) {
  const bool fits = in.flags().row_contiguous || (!dense && in.ndim() == 4 && can_read(in));
  return on_16_bytes(in) && fits ? in : contiguous_copy(in, encoder, stream);
}

Strides problem_strides(const mx::array& in) {
  // A dimension of one element may have any stride; it gets the plain one, so that equal layouts share a plan.
  const Strides plain = contiguous_strides(in.shape());
  auto stride = [&](int axis, std::int64_t otherwise) { return in.shape(axis) == 1 ? otherwise : in.strides(axis); };
  return {stride(0, plain.batch), stride(1, plain.head), stride(2, plain.row)};
}

Strides allocate_like(mx::array& out, const mx::array& pattern, const mx::Stream& stream) {
  if (!rows_first(pattern)) {
    allocate(out, stream);
    return contiguous_strides(out.shape());
  }
  const std::int64_t dim = out.shape(3);
  const std::int64_t heads = out.shape(1);
  const Strides strides{out.shape(2) * heads * dim, dim, heads * dim};
  allocate(out, {strides.batch, strides.head, strides.row, 1}, stream);
  return strides;
}

}  // namespace mlx_cuda
