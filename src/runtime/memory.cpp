#include "runtime/memory.h"

#include "runtime/status.h"

#include <mlx/backend/cuda/allocator.h>
#include <mlx/backend/cuda/utils.h>
#include <mlx/ops.h>
#include <mlx/primitives.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace mlx_cuda {

namespace {

// MLX does not export its stream-ordered allocator nor its copy kernels, but every primitive can be called through its vtable:
// a concatenation of nothing allocates its output and stops, and `contiguous` copies. The primitives are taken from public
// operations and never evaluated themselves.
struct Borrowed {
  std::shared_ptr<mx::Primitive> allocate;
  std::shared_ptr<mx::Primitive> copy;

  explicit Borrowed(const mx::Stream& stream) {
    const mx::array one = mx::ones({1}, mx::uint8, stream);
    allocate = mx::concatenate({one, one}, 0, stream).primitive_ptr();
    copy = mx::contiguous(one, false, stream).primitive_ptr();
  }
};

Borrowed& borrowed(const mx::Stream& stream) {
  static thread_local std::unordered_map<int, Borrowed> primitives;
  return primitives.try_emplace(stream.index, stream).first->second;
}

mx::array empty_array(const mx::Shape& shape, mx::Dtype dtype) {
  return mx::array(shape, dtype, nullptr, {});
}

void allocate_from_mlx(mx::array& out, const mx::Stream& stream) {
  std::vector<mx::array> outputs{out};
  borrowed(stream).allocate->eval_gpu({}, outputs);
}

// Frees memory from the driver's pool, or what MLX has put in its place: when the host reads an array MLX moves it to managed
// memory, or to pinned memory where the system has none, and marks that with device -1. MLX keeps an array until the work that
// uses it has run, and may drop it from a thread that has no context.
void free_pool_buffer(mx::allocator::Buffer buffer, CUcontext context) {
  const std::unique_ptr<mx::cu::CudaBuffer> memory(static_cast<mx::cu::CudaBuffer*>(buffer.ptr()));
  const auto address = reinterpret_cast<CUdeviceptr>(memory->data);
  if (!succeeded(cuCtxPushCurrent(context))) {
    return; // the process is ending
  }
  if (memory->device >= 0) {
    cuMemFreeAsync(address, nullptr);
  } else {
    unsigned managed = 0;
    cuPointerGetAttribute(&managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, address);
    managed ? cuMemFree(address) : cuMemFreeHost(memory->data);
  }
  cuCtxPopCurrent(nullptr);
}

void allocate_from_pool(mx::array& out, const mx::Stream& stream) {
  auto& encoder = mx::cu::get_command_encoder(stream);
  CUcontext context = nullptr;
  MLX_CUDA_CHECK(cuCtxGetCurrent(&context));
  CUdeviceptr address = 0;
  const CUstream queue = encoder.stream();
  MLX_CUDA_CHECK(cuMemAllocAsync(&address, std::max<std::size_t>(out.nbytes(), 1), queue));
  auto memory = std::make_unique<mx::cu::CudaBuffer>();
  *memory = {reinterpret_cast<void*>(address), out.nbytes(), encoder.device().cuda_device()};
  out.set_data(
      mx::allocator::Data(
          mx::allocator::Buffer(memory.release()), [context](mx::allocator::Buffer buffer) { free_pool_buffer(buffer, context); }));
}

// Whether borrowing does what this file believes it does, tried once: the array is owned by MLX and lies in device memory.
bool borrowing_works(const mx::Stream& stream) {
  if (const char* route = std::getenv("MLX_CUDA_ALLOCATION"); route && std::string_view(route) == "pool") {
    return false;
  }
  try {
    mx::array probe = empty_array({4096}, mx::uint8);
    allocate_from_mlx(probe, stream);
    if (!probe.data_shared_ptr() || !probe.data_shared_ptr()->is_owned() || probe.data_size() != probe.size()) {
      return false;
    }
    unsigned type = 0;
    const auto address = reinterpret_cast<CUdeviceptr>(mx::gpu_ptr<void>(probe));
    return succeeded(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address)) && probe.buffer_size() >= probe.nbytes();
  } catch (const std::exception&) {
    return false;
  }
}

bool use_mlx(const mx::Stream& stream) {
  static const bool works = borrowing_works(stream);
  return works;
}

} // namespace

void allocate(mx::array& out, const mx::Stream& stream) {
  use_mlx(stream) ? allocate_from_mlx(out, stream) : allocate_from_pool(out, stream);
}

void allocate(mx::array& out, const mx::Strides& strides, const mx::Stream& stream) {
  mx::array memory = empty_array(out.shape(), out.dtype());
  allocate(memory, stream);
  // Dense but permuted; neither order holds, except by a coincidence that MLX need not know of.
  const bool row_contiguous = strides == memory.strides();
  out.copy_shared_buffer(memory, strides, {true, row_contiguous, false}, out.size());
}

void* workspace(std::size_t bytes, mx::cu::CommandEncoder& encoder, const mx::Stream& stream) {
  if (bytes == 0) {
    return nullptr;
  }
  // Units of 256 bytes, because a dimension of an MLX array is an int.
  mx::array memory = empty_array({static_cast<int>((bytes + 255) / 256), 256}, mx::uint8);
  allocate(memory, stream);
  encoder.add_temporary(memory);
  return mx::gpu_ptr<void>(memory);
}

mx::array contiguous_copy(const mx::array& in, mx::cu::CommandEncoder& encoder, const mx::Stream& stream) {
  std::vector<mx::array> outputs{empty_array(in.shape(), in.dtype())};
  borrowed(stream).copy->eval_gpu({in}, outputs);
  encoder.add_temporary(outputs[0]);
  return outputs[0];
}

const char* allocation_route(const mx::Stream& stream) {
  return use_mlx(stream) ? "mlx" : "pool";
}

} // namespace mlx_cuda
