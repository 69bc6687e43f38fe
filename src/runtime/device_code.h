// The project's own kernels: the packed fatbins next to the native module (ci/device), each unpacked and loaded into the
// driver on first use.
#pragma once

#include <cuda.h>
#include <mlx/dtype.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace mlx_cuda {

// Attributes of the current device.
int device_attribute(CUdevice_attribute attribute);

// Of the current device, such as 90, or the older one that MLX_CUDA_CAPABILITY names (docs/results/platforms.md).
int compute_capability();

// Whether that has the kernels for Hopper.
bool is_hopper();

// Bytes of shared memory of a multiprocessor, and how many of them one block may use; of the GPU that is named, as above.
int shared_memory();
int shared_memory_limit();

// How many multiprocessors the current device has, and bytes of memory.
int multiprocessors();
std::int64_t device_memory();

// As kernels are named after it: "float32", "float16" or "bfloat16".
std::string type_name(mlx::core::Dtype dtype);

// Whether it is a float of 16 bits.
inline bool is_half(mlx::core::Dtype dtype) {
  return dtype == mlx::core::float16 || dtype == mlx::core::bfloat16;
}

// Hands over the packed fatbin of one source. Python has read and checked the file: what happens to it later cannot reach the GPU.
void add_device_code(const std::string& source, std::string_view packed);

// A kernel by name, and the .cu file, without its suffix, that it is in.
struct KernelName {
  const char* source;
  std::string name;
};

// The kernels of one .cu file. Thread-safe; loaded once per process, however many of these there are, and never unloaded (the
// driver does that at exit).
class KernelModule {
 public:
  explicit KernelModule(const char* source);

  // The function of an extern "C" kernel for the current device, allowed to use as much dynamic shared memory as the device has.
  CUfunction function(std::string_view name);

 private:
  struct Code;

  static Code& code_of(const std::string& source);

  Code& code_;
};

}  // namespace mlx_cuda
