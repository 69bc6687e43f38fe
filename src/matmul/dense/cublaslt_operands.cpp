#include "matmul/dense/cublaslt_operands.h"

#include "elementwise/noise.h"
#include "runtime/device_code.h"
#include "runtime/status.h"

#include <algorithm>
#include <initializer_list>

namespace mlx_cuda {

namespace {

NoiseType noise_type(mx::Dtype dtype) {
  switch (dtype.val()) {
    case mx::Dtype::Val::float32:
      return NoiseType::float32;
    case mx::Dtype::Val::float16:
      return NoiseType::float16;
    case mx::Dtype::Val::uint8:
      return NoiseType::fp8;
    default:
      return NoiseType::bfloat16;
  }
}

// Enough for every scaling of x and of w.
std::int64_t scale_count(const MatmulProblem& problem) {
  const std::int64_t blocks = (problem.inner + 127) / 128 + 3;
  return problem.dtype == mx::uint8 ? (std::max(problem.rows, problem.columns) + 127) * blocks : 0;
}

}  // namespace

TuningOperands::Part::Part(mx::Dtype type, std::int64_t numbers)
    : dtype(type), count(numbers), memory(static_cast<std::size_t>(numbers) * mx::size_of(type)) {}

TuningOperands::TuningOperands(const MatmulProblem& problem)
    : problem_(problem),
      x_(problem.dtype, (problem.x_transposed ? problem.inner : problem.rows) * problem.x_stride),
      w_(problem.dtype, (problem.w_transposed ? problem.inner : problem.columns) * problem.w_stride),
      out_(problem.out_dtype, problem.rows * problem.out_stride),
      bias_(problem.out_dtype, problem.has_bias ? problem.columns : 0),
      inside_(problem.out_dtype, problem.keeps_inside ? problem.rows * problem.columns : 0),
      scales_(mx::float32, scale_count(problem)) {}

std::optional<MatmulPointers> TuningOperands::pointers(CUstream stream) const {
  static KernelModule kernels("noise");
  for (const Part* part : {&x_, &w_, &out_, &bias_, &inside_, &scales_}) {
    void* data = part->memory.get();
    long long count = part->count;
    NoiseType type = noise_type(part->dtype);
    void* arguments[] = {&data, &count, &type};
    if (count > 0 && !data) {
      return std::nullopt;
    }
    if (count > 0) {
      MLX_CUDA_CHECK(cuLaunchKernel(kernels.function("noise"), 1024, 1, 1, 256, 1, 1, 0, stream, arguments, nullptr));
    }
  }
  return MatmulPointers{x_.memory.get(),      w_.memory.get(),      out_.memory.get(),   bias_.memory.get(),
                        inside_.memory.get(), scales_.memory.get(), scales_.memory.get()};
}

std::size_t TuningOperands::traffic() const {
  const MatmulProblem& p = problem_;
  return static_cast<std::size_t>((p.rows + p.columns) * p.inner) * mx::size_of(p.dtype) +
         static_cast<std::size_t>(p.rows * p.columns) * mx::size_of(p.out_dtype);
}

}  // namespace mlx_cuda
