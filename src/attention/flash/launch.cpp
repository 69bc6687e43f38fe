#include "attention/flash/launch.h"

#include "runtime/device_code.h"
#include "runtime/memory.h"
#include "runtime/tensor_map.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace mlx_cuda {

namespace {

// tanh(x) / x for |x| <= 1 in powers of x^2: a fit with Chebyshev polynomials, whose relative error is 7e-6.
FlashCap cap_of(float scale, float softcap) {
  constexpr std::array<double, 5> fit{0.99999344, -0.33299112, 0.13041894, -0.04489737, 0.0090758186};
  const double inner = static_cast<double>(scale) / softcap;
  const double outer = softcap * 1.4426950408889634;
  FlashCap cap{static_cast<float>(inner), static_cast<float>(outer), {}};
  double power = inner * outer;
  for (std::size_t i = 0; i < fit.size(); ++i) {
    cap.fit[i] = static_cast<float>(fit[i] * power);
    power *= inner * inner;
  }
  return cap;
}

std::int64_t heads_of(const FlashParams& p) {
  return std::int64_t{p.batch} * p.heads;
}

std::int64_t pieces_of(const FlashParams& p, const FlashPlan& plan) {
  return (std::int64_t{p.q_length} + plan.rows - 1) / plan.rows * heads_of(p);
}

// Of the keys and values of one kv head.
std::int64_t kv_bytes(const FlashParams& p, std::int64_t itemsize) {
  return std::int64_t{p.kv_length} * (p.head_dim + p.v_head_dim) * itemsize;
}

// Heads whose blocks run together, the longest rows of all of them first: many, so that no long rows are left for the end, but no
// more than those whose keys and values the L2 cache holds or which several blocks read at the same time.
int section(const FlashParams& p, std::int64_t itemsize) {
  constexpr std::int64_t blocks_together = 8;
  const std::int64_t group = p.heads / p.kv_heads;
  const std::int64_t cached =
      device_attribute(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE) / 2 / std::max<std::int64_t>(kv_bytes(p, itemsize), 1);
  const std::int64_t shared = multiprocessors() * 2 / blocks_together;
  return static_cast<int>(std::clamp<std::int64_t>(std::max(cached, shared) * group, 1, heads_of(p)));
}

// The same on Hopper, where query heads of one kv head share its bytes.
int section_sm90(const FlashParams& p) {
  constexpr std::int64_t cached = 32 << 20;  // bytes of keys and values that stay in the L2 cache
  const std::int64_t bytes = kv_bytes(p, 2) * p.kv_heads / p.heads + 1;
  return static_cast<int>(std::clamp<std::int64_t>(cached / bytes, 1, heads_of(p)));
}

// Pieces of the same size run on as many blocks as there are multiprocessors. Where they differ, the hardware spreads them better.
bool even_pieces(const FlashParams& p) {
  return !p.mask.tiles && (p.window_right < 0 || p.window_left >= 0) && !p.ends && !p.cu_q;
}

void launch_portable(const FlashPlan& plan, FlashParams& params, const FlashOperands& operands, KernelNode& node) {
  static KernelModule kernels("flash");
  params.section = section(params, operands.q.itemsize());
  node.launch(
      kernels.function(plan.kernel), dim3(static_cast<unsigned>(pieces_of(params, plan))), plan.threads,
      static_cast<unsigned>(plan.shared_bytes), params);
}

void launch_sm90(const FlashPlan& plan, FlashParams& params, const FlashOperands& operands, KernelNode& node) {
  static KernelModule kernels("flash_sm90");
  params.section = section_sm90(params);
  const std::int64_t pieces = pieces_of(params, plan);
  const dim3 grid(static_cast<unsigned>(even_pieces(params) ? std::min<std::int64_t>(pieces, multiprocessors()) : pieces));
  auto add = [&](const auto&... bias) {
    node.launch(
        kernels.function(plan.kernel), grid, plan.threads, static_cast<unsigned>(plan.shared_bytes), params,
        tensor_map(operands.q, plan.rows), tensor_map(operands.k, plan.keys), tensor_map(operands.v, plan.keys), bias...);
  };
  if (plan.kind == FlashKind::biased) {
    add(mask_tensor_map(*operands.mask, plan.rows));
  } else {
    add();
  }
}

}  // namespace

mx::array copyable_bias(const mx::array& mask, CommandEncoder& encoder, const mx::Stream& stream) {
  if (copyable_mask(mask) || mask.strides(3) == 0 || mask.shape(3) * mask.itemsize() % 16 != 0) {
    return mask;
  }
  mx::Shape own = mask.shape();
  for (int axis = 0; axis < 3; ++axis) {
    own[axis] = mask.strides(axis) == 0 ? 1 : own[axis];
  }
  const mx::array copy = contiguous_copy(view(mask, own, mask.strides(), false), encoder, stream);
  mx::Strides strides = copy.strides();
  for (int axis = 0; axis < 3; ++axis) {
    strides[axis] = own[axis] == mask.shape(axis) ? strides[axis] : 0;
  }
  return view(copy, mask.shape(), strides, false);
}

void launch_flash(const FlashPlan& plan, FlashParams params, const FlashOperands& operands, KernelNode& node) {
  if (params.softcap > 0) {
    params.cap = cap_of(params.scale, params.softcap);
  }
  (plan.source == std::string_view("flash") ? launch_portable : launch_sm90)(plan, params, operands, node);
}

}  // namespace mlx_cuda
