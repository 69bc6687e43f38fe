#include "matmul/grouped/upstream_operand.h"

#include "runtime/fused.h"
#include "runtime/memory.h"

#include <utility>

namespace mlx_cuda {

namespace {

// The strides of a dense array [..., rows, columns], or of one that is column-major.
mx::Strides dense_strides(mx::Shape shape, bool columns) {
  const std::size_t last = shape.size() - 1;
  if (columns) {
    std::swap(shape[last], shape[last - 1]);
  }
  mx::Strides strides = mx::array(std::move(shape), mx::bool_, nullptr, {}).strides();
  if (columns) {
    std::swap(strides[last], strides[last - 1]);
  }
  return strides;
}

class UpstreamOperand final : public Stateful<bool> {
 public:
  using Stateful::Stateful;
  DEFINE_NAME(UpstreamOperand)

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    return {inputs[0].shape()};
  }

  Arrays vjp(const Arrays&, const Arrays& cotangents, const std::vector<int>&, const Arrays&) override {
    return {state_ ? cotangents[0] : upstream_operand(cotangents[0], false, queue())};
  }

 protected:
  Arrays compose(const Arrays& inputs) const override {
    return {inputs[0]};
  }

  bool is_composable() const override {
    return false;
  }

  void encode(const Arrays& inputs, Arrays& outputs, CommandEncoder& encoder) override {
    const mx::array& in = inputs[0];
    mx::array& out = outputs[0];
    if (in.size() == 0) {
      allocate(out, stream());
      return;
    }
    const auto address = reinterpret_cast<std::uintptr_t>(mx::gpu_ptr<void>(in));
    const OperandLayout layout = layout_for_upstream(in.shape(), in.strides(), address, state_);
    const bool columns = layout == OperandLayout::columns || layout == OperandLayout::copied_columns;
    auto share = [&](const mx::array& memory) {
      out.copy_shared_buffer(memory, dense_strides(in.shape(), columns), {true, !columns, false}, out.size());
    };
    if (layout == OperandLayout::copied_rows) {
      share(contiguous_copy(in, encoder, stream()));
    } else if (layout == OperandLayout::copied_columns) {
      const int last = static_cast<int>(in.ndim()) - 1;
      mx::Shape shape = in.shape();
      mx::Strides strides = in.strides();
      std::swap(shape[last], shape[last - 1]);
      std::swap(strides[last], strides[last - 1]);
      share(contiguous_copy(view(in, shape, strides, false), encoder, stream()));
    } else {
      share(in);
    }
  }
};

}  // namespace

mx::array upstream_operand(const mx::array& in, bool weights, const mx::Stream& stream) {
  return result_of<UpstreamOperand>({in}, in.dtype(), stream, weights);
}

}  // namespace mlx_cuda
