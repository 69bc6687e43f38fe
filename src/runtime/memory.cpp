#include "runtime/memory.h"

#include "device/layout.h"
#include "runtime/device_code.h"
#include "runtime/faults.h"
#include "runtime/kernel_table.h"
#include "runtime/mlx_internals.h"
#include "runtime/node.h"
#include "runtime/status.h"

#include <mlx/backend/cuda/allocator.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <memory>
#include <string_view>
#include <unordered_map>
#include <utility>

namespace mlx_cuda {

namespace {

mx::array empty_array(mx::Shape shape, mx::Dtype dtype) {
  return mx::array(std::move(shape), dtype, nullptr, {});
}

// Frees memory of the driver's pool, or the memory to which MLX moved it when the host read it. MLX keeps an array until the work
// that uses it has run, and may drop it from a thread without a context.
void free_pool_buffer(mx::allocator::Buffer buffer, CUcontext context) {
  const std::unique_ptr<mx::cu::CudaBuffer> memory(static_cast<mx::cu::CudaBuffer*>(buffer.ptr()));
  const auto address = reinterpret_cast<CUdeviceptr>(memory->data);
  if (!succeeded(cuCtxPushCurrent(context))) {
    return;  // the process is ending
  }
  if (is_of_the_host(*memory)) {
    unsigned managed = 0;
    cuPointerGetAttribute(&managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, address);
    managed ? cuMemFree(address) : cuMemFreeHost(memory->data);
  } else {
    cuMemFreeAsync(address, nullptr);
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
  out.set_data(mx::allocator::Data(mx::allocator::Buffer(memory.release()), [context](mx::allocator::Buffer buffer) {
    free_pool_buffer(buffer, context);
  }));
}

// Whether MLX's allocator can be used (mlx_internals.h), tried once: the array is owned by MLX and is in device memory.
bool mlx_allocates(const mx::Stream& stream) {
  if (const char* route = std::getenv("MLX_CUDA_ALLOCATION"); route && std::string_view(route) == "pool") {
    return false;
  }
  try {
    mx::array probe = empty_array({4096}, mx::uint8);
    allocate_by_mlx(probe, stream);
    if (!probe.data_shared_ptr() || !probe.data_shared_ptr()->is_owned() || probe.data_size() != probe.size()) {
      return false;
    }
    unsigned type = 0;
    const auto address = reinterpret_cast<CUdeviceptr>(mx::gpu_ptr<void>(probe));
    return succeeded(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address)) &&
           probe.buffer_size() >= probe.nbytes();
  } catch (const std::exception& error) {
    const std::string_view text = error.what();
    if (text.find("out of memory") != text.npos || text.find("Unable to allocate") != text.npos) {
      throw;  // out of memory at the moment says nothing about later
    }
    return false;
  }
}

bool use_mlx(const mx::Stream& stream) {
  static const bool works = mlx_allocates(stream);
  return works;
}

}  // namespace

void allocate(mx::array& out, const mx::Stream& stream) {
  if (fault("memory")) {
    throw std::runtime_error("[mlx_cuda] A test has no memory left.");
  }
  use_mlx(stream) ? allocate_by_mlx(out, stream) : allocate_from_pool(out, stream);
}

void allocate(mx::array& out, const mx::Strides& strides, const mx::Stream& stream) {
  mx::array memory = empty_array(out.shape(), out.dtype());
  allocate(memory, stream);
  // Dense, and perhaps permuted; that it is column-contiguous MLX need not know.
  const bool row_contiguous = strides == memory.strides();
  out.copy_shared_buffer(memory, strides, {true, row_contiguous, false}, out.size());
}

mx::array temporary(mx::Shape shape, mx::Dtype dtype, CommandEncoder& encoder, const mx::Stream& stream) {
  mx::array out = empty_array(std::move(shape), dtype);
  allocate(out, stream);
  encoder.add_temporary(out);
  return out;
}

namespace {

thread_local int own_temporaries = 0;

}  // namespace

OwnTemporaries::OwnTemporaries() {
  ++own_temporaries;
}

OwnTemporaries::~OwnTemporaries() {
  --own_temporaries;
}

mx::array temporary_in_turn(mx::Shape shape, mx::Dtype dtype, CommandEncoder& encoder, const mx::Stream& stream) {
  if (own_temporaries > 0) {
    return temporary(std::move(shape), dtype, encoder, stream);
  }
  // Only work that has not finished holds the memory.
  static thread_local std::unordered_map<int, std::array<std::weak_ptr<mx::array>, 2>> all;
  auto& [older, newer] = all[stream.index];
  mx::array out = empty_array(std::move(shape), dtype);
  auto memory = older.lock();
  if (!memory || memory->nbytes() < out.nbytes()) {
    memory = std::make_shared<mx::array>(empty_array(out.shape(), dtype));
    allocate(*memory, stream);
  }
  older = std::exchange(newer, memory);
  encoder.add_completed_handler([memory] {});
  out.copy_shared_buffer(*memory, out.strides(), {true, true, false}, out.size());
  return out;
}

void* workspace(std::size_t bytes, CommandEncoder& encoder, const mx::Stream& stream) {
  if (bytes == 0) {
    return nullptr;
  }
  // Units of 256 bytes, because a dimension of an MLX array is an int.
  mx::array memory = temporary({static_cast<int>((bytes + 255) / 256), 256}, mx::uint8, encoder, stream);
  return mx::gpu_ptr<void>(memory);
}

mx::array view(const mx::array& in, mx::Shape shape, const mx::Strides& strides, bool row_contiguous) {
  mx::array out = empty_array(std::move(shape), in.dtype());
  out.copy_shared_buffer(in, strides, {row_contiguous, row_contiguous, false}, in.data_size());
  return out;
}

mx::array view(const mx::array& in, mx::Shape shape) {
  const mx::array out = empty_array(std::move(shape), in.dtype());
  return view(in, out.shape(), out.strides(), true);
}

bool can_copy(const mx::array& in) {
  return (in.itemsize() == 1 || in.itemsize() == 2 || in.itemsize() == 4) && in.ndim() <= kMaxDimensions;
}

bool on_16_bytes(const mx::array& in) {
  return !in.data_shared_ptr() || reinterpret_cast<std::uintptr_t>(mx::gpu_ptr<void>(in)) % 16 == 0;
}

mx::array contiguous_copy(const mx::array& in, CommandEncoder& encoder, const mx::Stream& stream) {
  static KernelModule kernels("copy");
#define MLX_CUDA_COPY_ROW(name, type, bytes) {#name, {bytes}},
  static constexpr auto table = std::to_array<KernelRow<std::size_t>>({MLX_CUDA_COPY_KERNELS(MLX_CUDA_COPY_ROW)});
  const bool small = in.nbytes() < 16;  // larger arrays are aligned to 16 bytes by MLX's allocator
  mx::array out =
      small ? view(temporary({16}, in.dtype(), encoder, stream), in.shape()) : temporary(in.shape(), in.dtype(), encoder, stream);
  Layout layout{};
  for (int axis = 0; axis < static_cast<int>(in.ndim()); ++axis) {
    if (in.shape(axis) != 1) {
      layout.shape[layout.dimensions] = in.shape(axis);
      layout.strides[layout.dimensions++] = in.strides(axis);
    }
  }
  KernelNode node(encoder);
  const void* from = node.reads(in);
  void* to = node.writes(out);
  const auto size = static_cast<long long>(out.size());
  constexpr unsigned threads = 256;
  const auto blocks = static_cast<unsigned>(std::min<long long>(ceil_div<long long>(size, threads), 1 << 16));
  node.launch(kernels.function(kernel_for(table, in.itemsize())), blocks, threads, 0, from, to, size, layout);
  return out;
}

mx::array contiguous(const mx::array& in, CommandEncoder& encoder, const mx::Stream& stream) {
  return in.flags().row_contiguous ? in : contiguous_copy(in, encoder, stream);
}

mx::array contiguous_on_16_bytes(const mx::array& in, CommandEncoder& encoder, const mx::Stream& stream) {
  return on_16_bytes(in) ? contiguous(in, encoder, stream) : contiguous_copy(in, encoder, stream);
}

MaybeArray contiguous(const MaybeArray& in, CommandEncoder& encoder, const mx::Stream& stream) {
  return in ? std::optional(contiguous(*in, encoder, stream)) : std::nullopt;
}

MaybeArray contiguous_on_16_bytes(const MaybeArray& in, CommandEncoder& encoder, const mx::Stream& stream) {
  return in ? std::optional(contiguous_on_16_bytes(*in, encoder, stream)) : std::nullopt;
}

bool elements_adjacent(const mx::array& in) {
  return in.strides(-1) == 1 || in.shape(-1) == 1;
}

bool rows_readable(const mx::array& in) {
  for (int axis = 0; axis < static_cast<int>(in.ndim()) - 1; ++axis) {
    if (in.shape(axis) != 1 && in.strides(axis) * static_cast<std::int64_t>(in.itemsize()) % 16 != 0) {
      return false;
    }
  }
  return elements_adjacent(in) && on_16_bytes(in);
}

mx::array with_readable_rows(const mx::array& in, CommandEncoder& encoder, const mx::Stream& stream) {
  return rows_readable(in) ? in : contiguous_copy(in, encoder, stream);
}

mx::array with_adjacent_elements(const mx::array& in, CommandEncoder& encoder, const mx::Stream& stream) {
  return elements_adjacent(in) ? in : contiguous_copy(in, encoder, stream);
}

std::optional<std::int64_t> row_distance(const mx::array& in) {
  if (!elements_adjacent(in)) {
    return std::nullopt;
  }
  std::optional<std::int64_t> distance;
  std::int64_t outer = 0;  // the expected stride of the next outer dimension
  for (int axis = static_cast<int>(in.ndim()) - 2; axis >= 0; --axis) {
    if (in.shape(axis) == 1) {
      continue;
    }
    if (!distance) {
      distance = in.strides(axis);
    } else if (in.strides(axis) != outer) {
      return std::nullopt;
    }
    outer = in.strides(axis) * in.shape(axis);
  }
  return distance.value_or(in.shape(-1));
}

SpacedRows with_spaced_rows(const mx::array& in, CommandEncoder& encoder, const mx::Stream& stream) {
  const auto distance = row_distance(in);
  return distance ? SpacedRows{in, *distance} : SpacedRows{contiguous_copy(in, encoder, stream), in.shape(-1)};
}

const char* allocation_route(const mx::Stream& stream) {
  return use_mlx(stream) ? "mlx" : "pool";
}

}  // namespace mlx_cuda
