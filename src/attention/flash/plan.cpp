#include "attention/flash/plan.h"

#include "runtime/device_code.h"

#include <algorithm>
#include <array>
#include <string_view>

namespace mlx_cuda {

namespace {

struct Kernel {
  std::string_view name;
  FlashShape shape;
};
#define MLX_CUDA_FLASH_ROW_16(name, ...) Kernel{#name, {.itemsize = 2, __VA_ARGS__}},
#define MLX_CUDA_FLASH_ROW_32(name, ...) Kernel{#name, {.itemsize = 4, __VA_ARGS__}},
constexpr auto kKernels = std::to_array<Kernel>({MLX_CUDA_FLASH_16_BITS(MLX_CUDA_FLASH_ROW_16, MLX_CUDA_FLASH_ROW_16)
                                                     MLX_CUDA_FLASH_32_BITS(MLX_CUDA_FLASH_ROW_32, MLX_CUDA_FLASH_ROW_32)});

#define MLX_CUDA_FLASH_ROW_BIASED(name, ...) FlashSm90Shape{__VA_ARGS__, .biased = true},
#define MLX_CUDA_FLASH_ROW_UNBIASED(name, ...) FlashSm90Shape{__VA_ARGS__},
constexpr auto kSm90Shapes =
    std::to_array<FlashSm90Shape>({MLX_CUDA_FLASH_SM90(MLX_CUDA_FLASH_ROW_BIASED, MLX_CUDA_FLASH_ROW_UNBIASED)});

constexpr bool fits(const FlashShape& shape, int itemsize, bool general, int head_dim, int v_head_dim, int shared_bytes) {
  return shape.itemsize == itemsize && (shape.general || !general) && head_dim <= shape.head_dim &&
         v_head_dim <= shape.v_head_dim && shape.shared_bytes() <= shared_bytes;
}

constexpr bool same_width(const FlashShape& one, const FlashShape& other) {
  return one.head_dim == other.head_dim && one.v_head_dim == other.v_head_dim;
}

// Whether as many of its blocks as it is made for run at once on a multiprocessor with so much shared memory.
constexpr bool is_resident(const FlashShape& shape, int shared_bytes) {
  constexpr int reserved = 1 << 10;  // of each block
  return shape.blocks * (shape.shared_bytes() + reserved) <= shared_bytes;
}

// The kernels of the usual widths, where a multiprocessor has least.
static_assert(std::all_of(kKernels.begin(), kKernels.end(), [](const Kernel& kernel) {
  return kernel.shape.itemsize != 2 || !kernel.shape.general || kernel.shape.head_dim > 128 ||
         is_resident(kernel.shape, 100 * 1024);
}));

// Whether operands of these widths have a kernel on a GPU that gives a block 99 KiB of shared memory, the least since sm_80.
constexpr bool fits_everywhere(int itemsize, int head_dim, int v_head_dim) {
  return std::any_of(kKernels.begin(), kKernels.end(), [&](const Kernel& kernel) {
    return fits(kernel.shape, itemsize, true, head_dim, v_head_dim, 99 * 1024);
  });
}
static_assert(fits_everywhere(2, 576, 512) && fits_everywhere(4, 256, 256));

// Hopper's code has none for less shared memory than it gives a block.
static_assert(std::all_of(kKernels.begin(), kKernels.end(), [](const Kernel& kernel) {
  return kernel.name.ends_with("_medium") || kernel.name.ends_with("_small") || kernel.shape.shared_bytes() <= 227 * 1024;
}));

const FlashSm90Shape& sm90_shape(const FlashCall& call) {
  const int widest = std::max(call.head_dim, call.v_head_dim);
  return *std::find_if(
      kSm90Shapes.begin(), kSm90Shapes.end() - 1, [&](const FlashSm90Shape& shape) { return widest <= shape.head_dim; });
}

FlashPlan plan_sm90(const FlashCall& call) {
  constexpr std::array<const char*, 4> names{"plain", "capped", "general", "biased"};  // as FlashKind
  const FlashSm90Shape& shape = sm90_shape(call);
  const FlashKind kind = !call.masked ? (call.softcap ? FlashKind::capped : FlashKind::plain)
                                      : (call.biased && takes_bias(call) ? FlashKind::biased : FlashKind::general);
  return {
      .source = "flash_sm90",
      .kernel = "flash_" + type_name(call.dtype) + '_' + std::to_string(shape.head_dim) + '_' + names[static_cast<int>(kind)],
      .kind = kind,
      .rows = shape.rows(),
      .keys = shape.keys,
      .threads = shape.threads(),
      .shared_bytes = shape.shared_bytes(kind),
  };
}

}  // namespace

bool on_flash_sm90(const FlashCall& call) {
  return is_hopper() && mx::size_of(call.dtype) == 2 && std::max(call.head_dim, call.v_head_dim) <= kSm90Shapes.back().head_dim;
}

bool takes_bias(const FlashCall& call) {
  return sm90_shape(call).biased && !call.softcap && !call.sinks && !call.lse;
}

std::optional<FlashPlan> plan_flash(const FlashCall& call) {
  if (on_flash_sm90(call)) {
    return plan_sm90(call);
  }
  const bool general = call.masked || call.softcap;
  const auto takes = [&](const Kernel& kernel) {
    return fits(
        kernel.shape, static_cast<int>(mx::size_of(call.dtype)), general, call.head_dim, call.v_head_dim, shared_memory_limit());
  };
  auto found = std::find_if(kKernels.begin(), kKernels.end(), takes);
  if (found == kKernels.end()) {
    return std::nullopt;
  }
  const auto resident = std::find_if(found, kKernels.end(), [&](const Kernel& kernel) {
    return takes(kernel) && same_width(kernel.shape, found->shape) && is_resident(kernel.shape, shared_memory());
  });
  found = resident != kKernels.end() ? resident : found;
  return FlashPlan{
      .source = "flash",
      .kernel = "flash_" + type_name(call.dtype) + '_' + std::string(found->name),
      .kind = FlashKind::general,
      .rows = found->shape.rows(),
      .keys = found->shape.keys,
      .threads = found->shape.threads(),
      .shared_bytes = found->shape.shared_bytes(),
  };
}

}  // namespace mlx_cuda
