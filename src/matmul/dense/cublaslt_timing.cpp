#include "matmul/dense/cublaslt_timing.h"

#include "elementwise/noise.h"
#include "runtime/device_code.h"
#include "runtime/status.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <memory>
#include <type_traits>
#include <utility>

namespace mlx_cuda {

namespace {

constexpr int kRounds = 9;

struct Destroyer {
  void operator()(CUevent event) const {
    cuEventDestroy(event);
  }
  void operator()(CUstream stream) const {
    cuStreamDestroy(stream);
  }
  void operator()(void* memory) const {
    cuMemFree(reinterpret_cast<CUdeviceptr>(memory));
  }
};
using Event = std::unique_ptr<std::remove_pointer_t<CUevent>, Destroyer>;
using Stream = std::unique_ptr<std::remove_pointer_t<CUstream>, Destroyer>;
using Memory = std::unique_ptr<void, Destroyer>;

Event make_event() {
  CUevent event = nullptr;
  MLX_CUDA_CHECK(cuEventCreate(&event, CU_EVENT_DEFAULT));
  return Event(event);
}

// One that waits for no other.
Stream make_stream() {
  CUstream stream = nullptr;
  MLX_CUDA_CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  return Stream(stream);
}

// From the driver; null where there is none.
Memory make_memory(std::size_t bytes) {
  CUdeviceptr address = 0;
  return Memory(bytes && succeeded(cuMemAlloc(&address, bytes)) ? reinterpret_cast<void*>(address) : nullptr);
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

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

class Operands {
 public:
  explicit Operands(const MatmulProblem& problem)
      : problem_(problem),
        x_(problem.dtype, (problem.x_transposed ? problem.inner : problem.rows) * problem.x_stride),
        w_(problem.dtype, (problem.w_transposed ? problem.inner : problem.columns) * problem.w_stride),
        out_(problem.out_dtype, problem.rows * problem.out_stride),
        bias_(problem.out_dtype, problem.has_bias ? problem.columns : 0),
        inside_(problem.out_dtype, problem.keeps_inside ? problem.rows * problem.columns : 0),
        scales_(mx::float32, scale_count(problem)) {}

  // Filled with noise, on the stream; none where memory is short.
  std::optional<MatmulPointers> pointers(CUstream stream) const {
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

  // The bytes that one GEMM reads and writes.
  std::size_t traffic() const {
    const MatmulProblem& p = problem_;
    return static_cast<std::size_t>((p.rows + p.columns) * p.inner) * mx::size_of(p.dtype) +
           static_cast<std::size_t>(p.rows * p.columns) * mx::size_of(p.out_dtype);
  }

 private:
  // One operand, of `count` numbers.
  struct Part {
    Part(mx::Dtype type, std::int64_t numbers)
        : dtype(type), count(numbers), memory(make_memory(static_cast<std::size_t>(numbers) * mx::size_of(type))) {}

    mx::Dtype dtype;
    std::int64_t count;
    Memory memory;
  };

  MatmulProblem problem_;
  Part x_, w_, out_, bias_, inside_, scales_;
};

}  // namespace

std::optional<std::vector<double>> time_candidates(
    const MatmulProblem& problem, const std::vector<Candidate>& candidates, const RunCandidate& run) {
  const Stream stream = make_stream();
  const Operands operands(problem);
  std::size_t most = 0;
  for (const Candidate& candidate : candidates) {
    most = std::max(most, candidate.workspaceSize);
  }
  const Memory workspace = make_memory(most);
  const auto pointers = operands.pointers(stream.get());
  if (!pointers || (most && !workspace.get())) {
    return std::nullopt;
  }
  const auto cache = static_cast<std::size_t>(device_attribute(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE));
  // Operands that fit the L2 cache are evicted before each run.
  const Memory other = make_memory(operands.traffic() < 2 * cache ? cache : 0);
  // All runs are queued at once: during pauses, clocks would rise above those under load.
  std::vector<std::vector<std::pair<Event, Event>>> runs(candidates.size());
  std::vector<bool> works(candidates.size(), true);
  for (auto& rounds : runs) {
    std::generate_n(std::back_inserter(rounds), kRounds + 1, [] { return std::pair(make_event(), make_event()); });
  }
  for (int round = 0; round <= kRounds; ++round) {
    for (std::size_t i = 0; i < candidates.size(); ++i) {
      if (!works[i]) {
        continue;
      }
      if (other.get()) {
        MLX_CUDA_CHECK(cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(other.get()), 0, cache, stream.get()));
      }
      MLX_CUDA_CHECK(cuEventRecord(runs[i][round].first.get(), stream.get()));
      works[i] = succeeded(run(candidates[i], *pointers, workspace.get(), stream.get()));
      MLX_CUDA_CHECK(cuEventRecord(runs[i][round].second.get(), stream.get()));
    }
  }
  MLX_CUDA_CHECK(cuStreamSynchronize(stream.get()));
  std::vector<double> medians(candidates.size(), std::numeric_limits<double>::infinity());
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    std::vector<double> times;
    for (int round = 1; works[i] && round <= kRounds; ++round) {  // the first warms up
      float milliseconds = 0;
      MLX_CUDA_CHECK(cuEventElapsedTime(&milliseconds, runs[i][round].first.get(), runs[i][round].second.get()));
      times.push_back(1e3 * milliseconds);
    }
    medians[i] = works[i] ? median(times) : medians[i];
  }
  return medians;
}

}  // namespace mlx_cuda
