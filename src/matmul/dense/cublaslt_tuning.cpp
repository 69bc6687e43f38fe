#include "matmul/dense/cublaslt_tuning.h"

#include "runtime/device_code.h"
#include "runtime/status.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <map>
#include <mutex>
#include <string_view>

namespace mlx_cuda {

namespace {

constexpr int kRounds = 9;
constexpr std::string_view kDigits = "0123456789abcdef";

std::atomic<bool> enabled{false};
std::atomic<unsigned> generation{0};
std::mutex mutex;

std::map<std::string, TunedMatmul>& entries() {
  static std::map<std::string, TunedMatmul> all;
  return all;
}

class Event {
 public:
  Event() {
    MLX_CUDA_CHECK(cuEventCreate(&event_, CU_EVENT_DEFAULT));
  }
  ~Event() {
    cuEventDestroy(event_);
  }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  operator CUevent() const {
    return event_;
  }

 private:
  CUevent event_ = nullptr;
};

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

bool tuning() {
  return enabled;
}

void set_tuning(bool on) {
  if (enabled.exchange(on) != on) {
    next_tuning_generation();  // problems met while it was off are timed after all
  }
}

unsigned tuning_generation() {
  return generation;
}

void next_tuning_generation() {
  ++generation;
}

std::string algorithm_text(const cublasLtMatmulAlgo_t& algorithm) {
  std::string text;
  for (const unsigned char byte : std::string_view(reinterpret_cast<const char*>(&algorithm), sizeof(algorithm))) {
    text += kDigits[byte / 16];
    text += kDigits[byte % 16];
  }
  return text;
}

bool algorithm_from(const std::string& text, cublasLtMatmulAlgo_t& algorithm) {
  if (text.size() != 2 * sizeof(algorithm) || text.find_first_not_of(kDigits) != std::string::npos) {
    return false;
  }
  auto* bytes = reinterpret_cast<unsigned char*>(&algorithm);
  for (std::size_t i = 0; i < sizeof(algorithm); ++i) {
    bytes[i] = static_cast<unsigned char>(kDigits.find(text[2 * i]) * 16 + kDigits.find(text[2 * i + 1]));
  }
  return true;
}

void store_tuned(const TunedMatmul& tuned) {
  const std::lock_guard lock(mutex);
  entries().insert_or_assign(tuned.key, tuned);
}

void clear_tuned() {
  const std::lock_guard lock(mutex);
  entries().clear();
}

bool any_tuned() {
  const std::lock_guard lock(mutex);
  return !entries().empty();
}

std::optional<TunedMatmul> find_tuned(const std::string& key) {
  const std::lock_guard lock(mutex);
  const auto found = entries().find(key);
  return found == entries().end() ? std::nullopt : std::optional(found->second);
}

std::vector<TunedMatmul> all_tuned() {
  const std::lock_guard lock(mutex);
  std::vector<TunedMatmul> all;
  for (const auto& [key, tuned] : entries()) {
    all.push_back(tuned);
  }
  return all;
}

std::string tuning_place() {
  CUdevice device = 0;
  char name[256] = {};
  MLX_CUDA_CHECK(cuCtxGetDevice(&device));
  MLX_CUDA_CHECK(cuDeviceGetName(name, sizeof(name) - 1, device));
  return std::string(name) + ", " + std::to_string(multiprocessors()) + " multiprocessors, cuBLASLt " +
         std::to_string(cublasLtGetVersion());
}

TuningMemory::TuningMemory(std::size_t bytes) {
  if (bytes && !succeeded(cuMemAlloc(&address_, bytes))) {
    address_ = 0;
  }
}

TuningMemory::~TuningMemory() {
  if (address_) {
    cuMemFree(address_);
  }
}

TuningStream::TuningStream() {
  MLX_CUDA_CHECK(cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING));
}

TuningStream::~TuningStream() {
  cuStreamDestroy(stream_);
}

std::vector<double> time_candidates(
    const std::vector<cublasLtMatmulHeuristicResult_t>& candidates,
    std::size_t bytes,
    CUstream stream,
    const std::function<cublasStatus_t(const cublasLtMatmulHeuristicResult_t&)>& run) {
  const auto cache = static_cast<std::size_t>(device_attribute(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE));
  const TuningMemory other(bytes < 2 * cache ? cache : 0);
  // All is queued at once: in pauses the clocks would rise to what they are not under load.
  struct Run {
    Event before, after;
  };
  std::vector<std::vector<Run>> runs(candidates.size());
  std::vector<bool> works(candidates.size(), true);
  for (auto& of_candidate : runs) {
    of_candidate = std::vector<Run>(kRounds + 1);
  }
  for (int round = 0; round <= kRounds; ++round) {
    for (std::size_t i = 0; i < candidates.size(); ++i) {
      if (!works[i]) {
        continue;
      }
      if (other.get()) {
        MLX_CUDA_CHECK(cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(other.get()), 0, cache, stream));
      }
      MLX_CUDA_CHECK(cuEventRecord(runs[i][round].before, stream));
      works[i] = succeeded(run(candidates[i]));
      MLX_CUDA_CHECK(cuEventRecord(runs[i][round].after, stream));
    }
  }
  MLX_CUDA_CHECK(cuStreamSynchronize(stream));
  std::vector<double> medians(candidates.size(), std::numeric_limits<double>::infinity());
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    std::vector<double> times;
    for (int round = 1; works[i] && round <= kRounds; ++round) {  // the first warms up
      float milliseconds = 0;
      MLX_CUDA_CHECK(cuEventElapsedTime(&milliseconds, runs[i][round].before, runs[i][round].after));
      times.push_back(1e3 * milliseconds);
    }
    medians[i] = works[i] ? median(times) : medians[i];
  }
  return medians;
}

}  // namespace mlx_cuda
