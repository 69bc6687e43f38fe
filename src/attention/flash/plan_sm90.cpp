#include "attention/flash/plan_sm90.h"

#include "runtime/device_code.h"
#include "runtime/memory.h"
#include "runtime/tensor_map.h"

#include <mlx/backend/cuda/utils.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>

namespace mlx_cuda {

namespace {

constexpr int kStages = 2;
constexpr int kGroupRows = 64;                    // of one warpgroup
constexpr int kWidestBiased = 128;                // head_dim that leaves room for tiles of the mask
constexpr std::int64_t kSectionBytes = 32 << 20;  // of keys and values that stay in the L2 cache

// One set of compiled kernels; the same numbers as at the end of attention/flash/flash_sm90.cu.
struct Variant {
  int head_dim;
  int keys;
  int groups;
};
constexpr std::array<Variant, 4> kVariants{{{64, 128, 3}, {128, 128, 2}, {192, 96, 2}, {256, 64, 2}}};

const Variant& variant_for(int head_dim, int v_head_dim) {
  return *std::find_if(
      kVariants.begin(), kVariants.end() - 1, [&](const Variant& each) { return std::max(head_dim, v_head_dim) <= each.head_dim; });
}

// Whether kernels with tiles of the mask in the ring take the call; they have no room for what else there is.
bool biased_takes(const FlashParams& params, const mx::array& mask) {
  const bool bare = params.softcap == 0 && !params.sinks && !params.lse;
  return mask.dtype() != mx::bool_ && bare && variant_for(params.head_dim, params.v_head_dim).head_dim <= kWidestBiased;
}

FlashKind kind_of(const FlashParams& params, const std::optional<mx::array>& mask) {
  if (!mask) {
    return params.softcap > 0 ? FlashKind::capped : FlashKind::plain;
  }
  return biased_takes(params, *mask) && copyable_mask(*mask) ? FlashKind::biased : FlashKind::general;
}

const char* name_of(FlashKind kind) {
  switch (kind) {
    case FlashKind::plain:
      return "_plain";
    case FlashKind::capped:
      return "_capped";
    case FlashKind::biased:
      return "_biased";
    default:
      return "_general";
  }
}

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

}  // namespace

bool flash_sm90_takes(const mx::array& q, const mx::array& v) {
  return is_hopper() && q.itemsize() == 2 && std::max(q.shape(-1), v.shape(-1)) <= kVariants.back().head_dim;
}

FlashTile flash_sm90_tile(int head_dim, int v_head_dim) {
  const Variant& variant = variant_for(head_dim, v_head_dim);
  return {kGroupRows * variant.groups, variant.keys};
}

mx::array flash_sm90_mask(
    const FlashParams& params, const mx::array& mask, mx::cu::CommandEncoder& encoder, const mx::Stream& stream) {
  if (!biased_takes(params, mask) || copyable_mask(mask) || mask.strides(3) == 0 || mask.shape(3) * mask.itemsize() % 16 != 0) {
    return mask;
  }
  mx::Shape own = mask.shape();
  for (int axis = 0; axis < 3; ++axis) {
    own[axis] = mask.strides(axis) == 0 ? 1 : own[axis];
  }
  mx::array part(own, mask.dtype(), nullptr, {});
  part.copy_shared_buffer(mask, mask.strides(), {false, false, false}, mask.data_size());
  const mx::array copy = contiguous_copy(part, encoder, stream);
  mx::Strides strides = copy.strides();
  for (int axis = 0; axis < 3; ++axis) {
    strides[axis] = own[axis] == mask.shape(axis) ? strides[axis] : 0;
  }
  mx::array whole(mask.shape(), mask.dtype(), nullptr, {});
  whole.copy_shared_buffer(copy, strides, {false, false, false}, copy.data_size());
  return whole;
}

void encode_flash_sm90(
    FlashParams params,
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    const std::optional<mx::array>& mask,
    mx::cu::CommandEncoder& encoder) {
  static KernelModule kernels("flash_sm90");
  const Variant& variant = variant_for(params.head_dim, params.v_head_dim);
  const FlashTile tile = flash_sm90_tile(params.head_dim, params.v_head_dim);
  const FlashKind kind = kind_of(params, mask);
  if (params.softcap > 0) {
    params.cap = cap_of(params.scale, params.softcap);
  }
  const std::int64_t row_tiles = (params.q_length + tile.rows - 1) / tile.rows;
  const std::int64_t heads = std::int64_t{params.heads} * params.batch;
  // Query heads of one kv head share its bytes.
  const std::int64_t bytes =
      std::int64_t{params.kv_length} * (params.head_dim + params.v_head_dim) * 2 * params.kv_heads / params.heads + 1;
  params.section = static_cast<int>(std::clamp<std::int64_t>(kSectionBytes / bytes, 1, heads));

  CUtensorMap q_map = tensor_map(q, tile.rows);
  CUtensorMap k_map = tensor_map(k, tile.keys);
  CUtensorMap v_map = tensor_map(v, tile.keys);
  const bool biased = kind == FlashKind::biased;
  const int stage = 2 * variant.head_dim * 2 * tile.keys + (biased ? tile.rows * tile.keys * 2 : 0);
  const int shared = variant.head_dim * 2 * tile.rows + kStages * stage + 1024 + 128;  // as Shared::kBytes
  const std::string name = std::string("flash_") + (q.dtype() == mx::float16 ? "float16_" : "bfloat16_") +
                           std::to_string(variant.head_dim) + name_of(kind);
  // Pieces of the same size run on as many blocks as there are multiprocessors. Where they differ, the hardware spreads them
  // better.
  const bool even = !params.mask.tiles && (params.window_right < 0 || params.window_left >= 0) && !params.ends && !params.cu_q;
  const std::int64_t pieces = row_tiles * heads;
  const dim3 grid(static_cast<unsigned>(even ? std::min<std::int64_t>(pieces, multiprocessors()) : pieces));
  const dim3 block(static_cast<unsigned>(tile.rows / kGroupRows + 1) * 128);
  auto add = [&](auto&... arguments) {
    encoder.add_kernel_node_ex(
        kernels.function(name), grid, block, dim3(), static_cast<std::uint32_t>(shared), params, q_map, k_map, v_map, arguments...);
  };
  if (biased) {
    CUtensorMap bias_map = mask_tensor_map(*mask, tile.rows);
    add(bias_map);
  } else {
    add();
  }
}

}  // namespace mlx_cuda
