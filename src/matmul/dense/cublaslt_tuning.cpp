#include "matmul/dense/cublaslt_tuning.h"

#include "runtime/device_code.h"
#include "runtime/status.h"

#include <atomic>
#include <map>
#include <mutex>
#include <string_view>

namespace mlx_cuda {

namespace {

constexpr std::string_view kDigits = "0123456789abcdef";

std::atomic<bool> enabled{false};
std::atomic<unsigned> generation{0};
std::mutex mutex;

std::map<std::string, TunedMatmul>& entries() {
  static std::map<std::string, TunedMatmul> all;
  return all;
}

}  // namespace

bool tuning() {
  return enabled;
}

void set_tuning(bool on) {
  if (enabled.exchange(on) != on) {
    ++generation;  // problems met while it was off are timed after all
  }
}

unsigned tuning_generation() {
  return generation;
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

void replace_tuned(const std::vector<TunedMatmul>& all) {
  const std::lock_guard lock(mutex);
  entries().clear();
  for (const TunedMatmul& tuned : all) {
    entries().insert_or_assign(tuned.key, tuned);
  }
  ++generation;
}

std::string tuning_place() {
  CUdevice device = 0;
  char name[256] = {};
  MLX_CUDA_CHECK(cuCtxGetDevice(&device));
  MLX_CUDA_CHECK(cuDeviceGetName(name, sizeof(name) - 1, device));
  return std::string(name) + ", " + std::to_string(multiprocessors()) + " multiprocessors, cuBLASLt " +
         std::to_string(cublasLtGetVersion());
}

}  // namespace mlx_cuda
