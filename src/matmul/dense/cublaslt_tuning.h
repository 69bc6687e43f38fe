// Algorithms of cuBLASLt that were timed on this machine, in the place of those that its heuristic puts first.
#pragma once

#include <cublasLt.h>
#include <cuda.h>

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace mlx_cuda {

// What was found for a problem. `key` names it together with the GPU and the library's version, within which the algorithm is
// valid.
struct TunedMatmul {
  std::string key;
  cublasLtMatmulAlgo_t algorithm;
  double microseconds;
  double first_microseconds;  // of the heuristic's first
};

// Whether new problems are timed, which takes some milliseconds each.
bool tuning();
void set_tuning(bool enabled);

// Changes whenever an algorithm that was chosen before may no longer be the one to choose.
unsigned tuning_generation();
void next_tuning_generation();

// The text of the algorithm is its bytes in hexadecimal; false when it is none.
std::string algorithm_text(const cublasLtMatmulAlgo_t& algorithm);
bool algorithm_from(const std::string& text, cublasLtMatmulAlgo_t& algorithm);

void store_tuned(const TunedMatmul& tuned);
void clear_tuned();
bool any_tuned();
std::optional<TunedMatmul> find_tuned(const std::string& key);
std::vector<TunedMatmul> all_tuned();

// The name of the GPU, its number of multiprocessors and the version of the library.
std::string tuning_place();

// Memory from the driver for as long as this object lives; null where there is none.
class TuningMemory {
 public:
  explicit TuningMemory(std::size_t bytes);
  ~TuningMemory();
  TuningMemory(const TuningMemory&) = delete;
  TuningMemory& operator=(const TuningMemory&) = delete;

  void* get() const {
    return reinterpret_cast<void*>(address_);
  }

 private:
  CUdeviceptr address_ = 0;
};

// A stream that waits for no other.
class TuningStream {
 public:
  TuningStream();
  ~TuningStream();
  TuningStream(const TuningStream&) = delete;
  TuningStream& operator=(const TuningStream&) = delete;

  operator CUstream() const {
    return stream_;
  }

 private:
  CUstream stream_ = nullptr;
};

// Runs the candidates in turn and returns the median time of each in microseconds, or infinity for one that failed. `bytes` is what
// a run reads and writes: what would fit the cache is thrown out of it before each run.
std::vector<double> time_candidates(
    const std::vector<cublasLtMatmulHeuristicResult_t>& candidates,
    std::size_t bytes,
    CUstream stream,
    const std::function<cublasStatus_t(const cublasLtMatmulHeuristicResult_t&)>& run);

}  // namespace mlx_cuda
