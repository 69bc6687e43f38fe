#include "runtime/device_code.h"

#include "runtime/faults.h"
#include "runtime/status.h"
#include "runtime/unpack.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <climits>
#include <cstdlib>
#include <functional>
#include <map>
#include <mutex>

namespace mlx_cuda {

namespace {

// The packed code by source.
std::map<std::string, std::string, std::less<>>& device_code() {
  static auto& packed = *new std::map<std::string, std::string, std::less<>>;  // never destroyed: a thread may outlive main
  return packed;
}

[[noreturn]] void lacks_code(const std::string& what) {
  throw Unavailable(
      "[mlx_cuda] This build of mlx-cuda holds no code of " + what + " for compute capability " +
      std::to_string(device_attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)) + "." +
      std::to_string(device_attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)) +
      ". Install a build for this GPU; `python -m mlx_cuda doctor` says what this one holds.");
}

int real_capability() {
  return 10 * device_attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) +
         device_attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
}

int named_capability() {
  static const char* named = std::getenv("MLX_CUDA_CAPABILITY");
  static const int capability = named ? std::atoi(named) : 0;  // Python refuses anything but numbers (_loader/native.py)
  return capability;
}

// Of a multiprocessor of the GPU that is named, where that is less than newer ones have.
int named_shared_memory() {
  switch (named_capability()) {
    case 75:
      return 64 << 10;
    case 86:
    case 89:
    case 120:
    case 121:
      return 100 << 10;
    case 80:
    case 87:
      return 164 << 10;
    default:
      return INT_MAX;
  }
}

// Has as many blocks run at once as a multiprocessor with that much shared memory would take.
void limit_residency(CUfunction function) {
  if (named_shared_memory() != INT_MAX) {
    const int all = device_attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR);
    const int percent = 100 * (shared_memory() >> 10) / (all >> 10);  // the driver takes the next larger division that there is
    MLX_CUDA_CHECK(cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, percent));
  }
}

}  // namespace

void add_device_code(const std::string& source, std::string_view packed) {
  device_code().insert_or_assign(source, std::string(packed));
}

int device_attribute(CUdevice_attribute attribute) {
  // Queried several times per call, and constant: cached, with a flag.
  constexpr int devices = 64;
  constexpr int attributes = 256;
  constexpr std::int64_t known = std::int64_t{1} << 32;
  static std::array<std::atomic<std::int64_t>, devices * attributes> values{};
  CUdevice device = 0;
  MLX_CUDA_CHECK(cuCtxGetDevice(&device));
  auto* const place = device < devices && attribute < attributes ? &values[device * attributes + attribute] : nullptr;
  if (const std::int64_t found = place ? place->load(std::memory_order_relaxed) : 0; found & known) {
    return static_cast<int>(found);
  }
  int value = 0;
  MLX_CUDA_CHECK(cuDeviceGetAttribute(&value, attribute, device));
  if (place) {
    place->store(known | static_cast<std::uint32_t>(value), std::memory_order_relaxed);
  }
  return value;
}

int compute_capability() {
  return named_capability() > 0 ? named_capability() : real_capability();
}

bool is_hopper() {
  return compute_capability() / 10 == 9;
}

int shared_memory() {
  return std::min(device_attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR), named_shared_memory());
}

int shared_memory_limit() {
  constexpr int reserved = 1 << 10;  // of each block, from sm_80 on
  return std::min(device_attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN), named_shared_memory() - reserved);
}

int multiprocessors() {
  return device_attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
}

std::int64_t device_memory() {
  constexpr int devices = 64;
  static std::array<std::atomic<std::int64_t>, devices> known{};
  CUdevice device = 0;
  MLX_CUDA_CHECK(cuCtxGetDevice(&device));
  if (device < devices && known[device].load(std::memory_order_relaxed) > 0) {
    return known[device].load(std::memory_order_relaxed);
  }
  std::size_t bytes = 0;
  MLX_CUDA_CHECK(cuDeviceTotalMem(&bytes, device));
  if (device < devices) {
    known[device].store(static_cast<std::int64_t>(bytes), std::memory_order_relaxed);
  }
  return static_cast<std::int64_t>(bytes);
}

std::string type_name(mlx::core::Dtype dtype) {
  using namespace mlx::core;
  return dtype == float32 ? "float32" : dtype == float16 ? "float16" : "bfloat16";
}

struct KernelModule::Code {
  std::string source{};
  std::mutex mutex{};
  std::map<int, CUlibrary> libraries{};  // by compute capability
  std::map<CUcontext, std::map<std::string, CUfunction, std::less<>>> functions{};
};

KernelModule::Code& KernelModule::code_of(const std::string& source) {
  static std::mutex mutex;
  static auto& all = *new std::map<std::string, Code>;  // never destroyed, as the packed code
  const std::lock_guard lock(mutex);
  Code& code = all[source];
  if (code.source.empty()) {
    code.source = source;
  }
  return code;
}

KernelModule::KernelModule(const char* source) : code_(code_of(source)) {}

CUfunction KernelModule::function(std::string_view name) {
  CUcontext context = nullptr;
  MLX_CUDA_CHECK(cuCtxGetCurrent(&context));
  if (fault("kernel")) {
    lacks_code(std::string(name));
  }
  auto& [source, mutex, libraries, all] = code_;
  const std::lock_guard lock(mutex);
  auto& functions = all[context];
  if (const auto known = functions.find(name); known != functions.end()) {
    return known->second;
  }
  CUlibrary& library = libraries[real_capability()];
  if (!library) {
    const auto packed = device_code().find(source);
    const std::string code = packed == device_code().end() ? "" : unpack_code(packed->second, real_capability());
    if (code.empty()) {
      lacks_code(source);
    }
    // The driver keeps a copy. A string's heap memory is aligned to 16 bytes, as it needs it.
    MLX_CUDA_CHECK(cuLibraryLoadData(&library, code.data(), nullptr, nullptr, 0, nullptr, nullptr, 0));
  }
  const std::string terminated(name);
  CUkernel kernel = nullptr;
  CUfunction function = nullptr;
  const CUresult found = cuLibraryGetKernel(&kernel, library, terminated.c_str());
  if (found == CUDA_ERROR_NOT_FOUND || found == CUDA_ERROR_NO_BINARY_FOR_GPU) {
    lacks_code(terminated);
  }
  MLX_CUDA_CHECK(found);
  MLX_CUDA_CHECK(cuKernelGetFunction(&function, kernel));
  int fixed = 0;
  MLX_CUDA_CHECK(cuFuncGetAttribute(&fixed, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function));
  MLX_CUDA_CHECK(cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_memory_limit() - fixed));
  limit_residency(function);
  functions.emplace(terminated, function);
  return function;
}

}  // namespace mlx_cuda
