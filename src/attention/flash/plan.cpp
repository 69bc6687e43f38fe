#include "attention/flash/plan.h"

#include "runtime/device_code.h"

#include <algorithm>
#include <array>
#include <string_view>

namespace mlx_cuda {

namespace {

struct Kernel {
  std::string_view name;
  std::string_view dtype;
  FlashShape shape;
};
#define MLX_CUDA_FLASH_ROW(name, dtype, ...) Kernel{#name, #dtype, {__VA_ARGS__}},
constexpr auto kKernels = std::to_array<Kernel>({MLX_CUDA_FLASH_KERNELS(MLX_CUDA_FLASH_ROW, MLX_CUDA_FLASH_ROW)});

struct Sm90Kernel {
  std::string_view name;
  std::string_view dtype;
  FlashKind kind;
  FlashSm90Shape shape;
};
#define MLX_CUDA_FLASH_SM90_ROW(name, dtype, kind, ...) Sm90Kernel{#name, #dtype, FlashKind::kind, {__VA_ARGS__}},
constexpr auto kSm90Kernels = std::to_array<Sm90Kernel>({MLX_CUDA_FLASH_SM90_KERNELS(MLX_CUDA_FLASH_SM90_ROW)});

constexpr bool fits(const FlashShape& shape, bool general, int head_dim, int v_head_dim, int shared_bytes) {
  return (shape.general || !general) && head_dim <= shape.head_dim && v_head_dim <= shape.v_head_dim &&
         shape.shared_bytes() <= shared_bytes;
}

constexpr bool same_width(const FlashShape& one, const FlashShape& other) {
  return one.head_dim == other.head_dim && one.v_head_dim == other.v_head_dim;
}

// Whether the kernel's number of blocks fits on an SM with so much shared memory.
constexpr bool is_resident(const FlashShape& shape, int shared_bytes) {
  constexpr int reserved = 1 << 10;  // of each block
  return shape.blocks * (shape.shared_bytes() + reserved) <= shared_bytes;
}

// The kernels of the usual widths, where a multiprocessor has least.
static_assert(
    std::all_of(
        kKernels.begin(),
        kKernels.end(),
        [](const Kernel& kernel) {
          return kernel.shape.itemsize != 2 || !kernel.shape.general || kernel.shape.head_dim > 128 ||
                 is_resident(kernel.shape, 100 * 1024);
        }),
    "general kernels of 16 bits up to head_dim 128 need their `blocks` blocks on a multiprocessor of 100 KiB");

// Whether operands of these widths have a kernel on a GPU that gives a block 99 KiB of shared memory, the least since sm_80.
constexpr bool fits_everywhere(std::string_view dtype, int head_dim, int v_head_dim) {
  return std::any_of(kKernels.begin(), kKernels.end(), [&](const Kernel& kernel) {
    return kernel.dtype == dtype && fits(kernel.shape, true, head_dim, v_head_dim, 99 * 1024);
  });
}
static_assert(
    fits_everywhere("float16", 576, 512) && fits_everywhere("bfloat16", 576, 512) && fits_everywhere("float32", 256, 256));

// Hopper's code has none for less shared memory than it gives a block.
static_assert(std::all_of(kKernels.begin(), kKernels.end(), [](const Kernel& kernel) {
  return kernel.name.ends_with("_medium") || kernel.name.ends_with("_small") || kernel.shape.shared_bytes() <= 227 * 1024;
}));

// The narrowest of a kind; null: none takes such operands.
const Sm90Kernel* sm90_kernel(const FlashCall& call, FlashKind kind) {
  const std::string dtype = type_name(call.dtype);
  const auto found = std::find_if(kSm90Kernels.begin(), kSm90Kernels.end(), [&](const Sm90Kernel& kernel) {
    return kernel.kind == kind && std::max(call.head_dim, call.v_head_dim) <= kernel.shape.head_dim && kernel.dtype == dtype;
  });
  return found == kSm90Kernels.end() ? nullptr : &*found;
}

// Of a kernel of either source.
FlashPlan plan_of(const char* source, const auto& kernel, FlashKind kind, int shared_bytes) {
  return {
      .source = source,
      .kernel = std::string(kernel.name),
      .kind = kind,
      .rows = kernel.shape.rows(),
      .keys = kernel.shape.keys,
      .threads = kernel.shape.threads(),
      .shared_bytes = shared_bytes,
  };
}

}  // namespace

bool on_flash_sm90(const FlashCall& call) {
  return is_hopper() && sm90_kernel(call, FlashKind::plain);
}

bool takes_bias(const FlashCall& call) {
  return !call.softcap && !call.sinks && !call.lse && sm90_kernel(call, FlashKind::biased);
}

std::optional<FlashPlan> plan_flash(const FlashCall& call) {
  if (on_flash_sm90(call)) {
    const FlashKind kind = !call.masked ? (call.softcap ? FlashKind::capped : FlashKind::plain)
                                        : (call.biased && takes_bias(call) ? FlashKind::biased : FlashKind::general);
    const Sm90Kernel& kernel = *sm90_kernel(call, kind);
    return plan_of("flash_sm90", kernel, kind, kernel.shape.shared_bytes(kind));
  }
  const bool general = call.masked || call.softcap;
  const std::string dtype = type_name(call.dtype);
  const auto takes = [&](const Kernel& kernel) {
    return kernel.dtype == dtype && fits(kernel.shape, general, call.head_dim, call.v_head_dim, shared_memory_limit());
  };
  auto found = std::find_if(kKernels.begin(), kKernels.end(), takes);
  if (found == kKernels.end()) {
    return std::nullopt;
  }
  const auto resident = std::find_if(found, kKernels.end(), [&](const Kernel& kernel) {
    return takes(kernel) && same_width(kernel.shape, found->shape) && is_resident(kernel.shape, shared_memory());
  });
  found = resident != kKernels.end() ? resident : found;
  return plan_of("flash", *found, FlashKind::general, found->shape.shared_bytes());
}

}  // namespace mlx_cuda
