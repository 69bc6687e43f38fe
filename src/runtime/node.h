// A kernel as a node of MLX's graph.
#pragma once

#include "runtime/arrays.h"

#include <mlx/backend/cuda/device.h>
#include <mlx/backend/cuda/utils.h>

#include <type_traits>

namespace mlx_cuda {

// Names the arrays that the next node reads and writes, and returns their addresses; then adds the node. Allocations come before,
// because they may add a node of their own.
class KernelNode {
 public:
  explicit KernelNode(CommandEncoder& encoder) : encoder_(encoder) {}

  template <typename T = void>
  auto reads(const mx::array& in) {
    encoder_.set_input_array(in);
    return mx::gpu_ptr<T>(in);
  }
  // Null where there is none.
  template <typename T = void>
  auto reads(const MaybeArray& in) {
    return in ? reads<T>(*in) : nullptr;
  }

  template <typename T = void>
  T* writes(mx::array& out) {
    encoder_.set_output_array(out);
    return mx::gpu_ptr<T>(out);
  }

  // The arguments have exactly the kernel's types. They are only copied.
  template <typename... Arguments>
  void launch(CUfunction kernel, dim3 grid, unsigned threads, unsigned shared_bytes, const Arguments&... arguments) {
    launch_in_clusters(1, kernel, grid, threads, shared_bytes, arguments...);
  }
  // Of so many blocks along the first axis of the grid. MLX's own graphs take a node with other clusters for the same one, so only
  // for captured steps.
  template <typename... Arguments>
  void launch_in_clusters(
      unsigned size, CUfunction kernel, dim3 grid, unsigned threads, unsigned shared_bytes, const Arguments&... arguments) {
    encoder_.add_kernel_node_ex(kernel, grid, dim3(threads), dim3(size), shared_bytes, const_cast<Arguments&>(arguments)...);
  }

 private:
  CommandEncoder& encoder_;
};

// Blocks along the second and along the third axis of a grid, at most.
inline constexpr int kMostGridRows = 65535;

template <typename T>
constexpr T ceil_div(T value, std::type_identity_t<T> by) {
  return (value + by - 1) / by;
}

}  // namespace mlx_cuda
