// Algorithms of cuBLASLt that were timed on this machine, used instead of its heuristic's first choice.
#pragma once

#include <cublasLt.h>

#include <optional>
#include <string>
#include <vector>

namespace mlx_cuda {

// The result of tuning a problem. `key` names the problem, the GPU and the library's version, for which the algorithm is valid.
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

// The text of the algorithm is its bytes in hexadecimal; false when it is none.
std::string algorithm_text(const cublasLtMatmulAlgo_t& algorithm);
bool algorithm_from(const std::string& text, cublasLtMatmulAlgo_t& algorithm);

void store_tuned(const TunedMatmul& tuned);
bool any_tuned();
std::optional<TunedMatmul> find_tuned(const std::string& key);
std::vector<TunedMatmul> all_tuned();
void replace_tuned(const std::vector<TunedMatmul>& all);

// The name of the GPU, its number of multiprocessors and the version of the library.
std::string tuning_place();

}  // namespace mlx_cuda
