#include "elementwise/swiglu.h"

#include "elementwise/kernels.h"
#include "runtime/device_code.h"
#include "runtime/kernel_table.h"
#include "runtime/memory.h"
#include "runtime/node.h"

#include <mlx/ops.h>

#include <algorithm>
#include <cstdint>

namespace mlx_cuda {

namespace {

KernelModule kernels("swiglu");
constexpr auto kKernels = std::to_array<KernelRow<std::string_view, bool>>({MLX_CUDA_SWIGLU_KERNELS(MLX_CUDA_KERNEL_ROW)});

SpacedRows as_rows(const mx::array& in, CommandEncoder& encoder, const mx::Stream& stream) {
  return in.ndim() == 0 ? SpacedRows{in, 1} : with_spaced_rows(in, encoder, stream);
}

class SwiGLU final : public Fused {
 public:
  using Fused::Fused;

  // In float32, as the kernel, so that gradients of 16-bit types lose nothing in between.
  static mx::array composed(const mx::array& gate, const mx::array& up, const mx::Stream& stream) {
    const mx::array wide = mx::astype(gate, mx::float32, stream);
    const mx::array silu = mx::multiply(wide, mx::sigmoid(wide, stream), stream);
    return mx::astype(mx::multiply(silu, mx::astype(up, mx::float32, stream), stream), gate.dtype(), stream);
  }

  DEFINE_NAME(SwiGLU)
  DEFINE_DEFAULT_IS_EQUIVALENT()

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    return {inputs[0].shape()};
  }

  std::pair<Arrays, std::vector<int>> vmap(const Arrays& inputs, const std::vector<int>& axes) override {
    mx::array gate = inputs[0];
    mx::array up = inputs[1];
    const int axis = axes[0] >= 0 ? axes[0] : axes[1];
    if (axes[0] < 0) {
      gate = mx::broadcast_to(mx::expand_dims(gate, axis, queue()), up.shape(), queue());
    } else if (axes[1] < 0) {
      up = mx::broadcast_to(mx::expand_dims(up, axis, queue()), gate.shape(), queue());
    } else if (axes[1] != axis) {
      up = mx::moveaxis(up, axes[1], axis, queue());
    }
    return {{swiglu(gate, up, queue())}, {axis}};
  }

 protected:
  Arrays compose(const Arrays& inputs) const override {
    return {composed(inputs[0], inputs[1], queue())};
  }

  void encode(const Arrays& inputs, Arrays& outputs, CommandEncoder& encoder) override {
    mx::array& out = outputs[0];
    const SpacedRows gate = as_rows(inputs[0], encoder, stream());
    const SpacedRows up = as_rows(inputs[1], encoder, stream());
    allocate(out, stream());
    long long columns = out.ndim() ? out.shape(-1) : 1;
    long long rows = static_cast<long long>(out.size()) / columns;
    long long gate_stride = gate.distance;
    long long up_stride = up.distance;
    if (gate_stride == columns && up_stride == columns) {  // one long row fills the blocks better than many short ones
      columns *= rows;
      rows = 1;
      gate_stride = up_stride = columns;
    }

    KernelNode node(encoder);
    const void* gate_data = node.reads(gate.array);
    const void* up_data = node.reads(up.array);
    void* out_data = node.writes(out);
    long long vector = 16 / static_cast<long long>(out.itemsize());
    auto fits = [&](const void* data, long long stride) {
      return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && (rows == 1 || stride % vector == 0);
    };
    const bool wide = columns % vector == 0 && fits(gate_data, gate_stride) && fits(up_data, up_stride) && fits(out_data, columns);
    if (!wide) {
      vector = 1;
    }

    constexpr unsigned threads = 256;
    const dim3 grid(ceil_div<long long>(columns / vector, threads), std::min<long long>(rows, kMostGridRows));
    node.launch(
        kernels.function(kernel_for(kKernels, type_name(out.dtype()), wide)), grid, threads, 0, gate_data, up_data, out_data, rows,
        columns, gate_stride, up_stride);
  }
};

}  // namespace

mx::array swiglu(const mx::array& gate, const mx::array& up, const mx::Stream& stream) {
  if (!can_copy(gate)) {
    return SwiGLU::composed(gate, up, stream);
  }
  return result_of<SwiGLU>({gate, up}, gate.dtype(), stream);
}

}  // namespace mlx_cuda
