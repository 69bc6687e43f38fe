#include "runtime/pdl.h"

#include "runtime/status.h"

#include <mutex>
#include <unordered_set>

namespace mlx_cuda {

namespace {

struct Kernels {
  std::mutex mutex;
  std::unordered_set<CUfunction> all;
  std::unordered_set<CUfunction> of_all_blocks;
};

Kernels& kernels() {
  static auto* const known = new Kernels;
  return *known;
}

}  // namespace

CUfunction with_pdl(CUfunction kernel) {
  const std::lock_guard lock(kernels().mutex);
  if (kernels().all.insert(kernel).second) {
    // As shared memory: a multiprocessor has blocks of two kernels at once only while it need not divide its memory otherwise.
    MLX_CUDA_CHECK(
        cuFuncSetAttribute(kernel, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, CU_SHAREDMEM_CARVEOUT_MAX_SHARED));
  }
  return kernel;
}

bool has_pdl(CUfunction kernel) {
  const std::lock_guard lock(kernels().mutex);
  return kernels().all.contains(kernel);
}

CUfunction with_all_blocks(CUfunction kernel) {
  const std::lock_guard lock(kernels().mutex);
  kernels().of_all_blocks.insert(kernel);
  return kernel;
}

bool needs_all_blocks(CUfunction kernel) {
  const std::lock_guard lock(kernels().mutex);
  return kernels().of_all_blocks.contains(kernel);
}

}  // namespace mlx_cuda
