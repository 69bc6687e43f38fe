#include "decoding/row_norm/row_norm.h"

#include "decoding/graph/views.h"
#include "decoding/row_norm/params.h"
#include "runtime/device_code.h"
#include "runtime/kernel_table.h"
#include "runtime/memory.h"
#include "runtime/node.h"
#include "runtime/pdl.h"

#include <mlx/fast_primitives.h>

#include <string>

namespace mlx_cuda {

namespace {

constexpr auto kKernels = std::to_array<KernelRow<std::string_view>>({MLX_CUDA_ROW_NORM_KERNELS(MLX_CUDA_KERNEL_ROW)});

// The one number that an array is multiplied by.
MaybeArray factor_of(const Plan& plan, const Item& multiply, const mx::array& of) {
  if (multiply.name != "Multiply" || multiply.outputs[0].shape() != of.shape()) {
    return std::nullopt;
  }
  const mx::array& other = multiply.inputs[multiply.inputs[0].id() == of.id() ? 1 : 0];
  const bool is_one = !plan.giver(other) && other.data_size() == 1 && other.dtype() == of.dtype();
  return is_one ? std::optional(other) : std::nullopt;
}

}  // namespace

std::optional<Item> row_norm_item(const Plan& plan, const Item& norm) {
  constexpr int piece = RowNormParams::kPiece;
  const mx::array& normed = norm.outputs[0];
  const mx::array& x = norm.inputs[0];
  const int inner = normed.shape(-1);
  if (!is_half(x.dtype()) || normed.dtype() != x.dtype() || inner % piece != 0 || inner > piece * RowNormParams::kMostThreads) {
    return std::nullopt;
  }
  MaybeArray weight;  // MLX has the number 1 where there is none
  if (norm.inputs[1].ndim() > 0) {
    weight = norm.inputs[1];
    if (weight->dtype() != x.dtype() || weight->ndim() != 1 || weight->shape(0) != inner || plan.giver(*weight) ||
        !weight->flags().row_contiguous || !on_16_bytes(*weight)) {
      return std::nullopt;
    }
  }
  const Item* reader = reader_of(plan, normed);
  const auto other = reader ? added_to(plan, *reader, normed) : std::nullopt;
  const auto scale = reader ? factor_of(plan, *reader, normed) : std::nullopt;
  if (!other && !scale) {
    return std::nullopt;
  }
  const float eps = static_cast<const mx::fast::RMSNorm&>(normed.primitive()).state().second;
  const std::string name = other ? "norm + add" : "norm x scale";
  return Item{name, joined({x}, other), reader->outputs, [=, out = reader->outputs[0]](const mx::Stream& stream) mutable {
                auto& encoder = mx::cu::get_command_encoder(stream);
                const mx::array given = contiguous_on_16_bytes(x, encoder, stream);
                const MaybeArray residual = contiguous_on_16_bytes(other, encoder, stream);
                allocate(out, stream);
                RowNormParams params{};
                KernelNode node(encoder);
                params.x = node.reads(given);
                params.norm = node.reads(weight);
                params.scale = node.reads(scale);
                params.added = node.reads(residual);
                params.out = node.writes(out);
                params.inner = inner;
                params.eps = eps;
                static KernelModule kernels("row_norm");
                CUfunction kernel = with_pdl(kernels.function(kernel_for(kKernels, type_name(out.dtype()))));
                node.launch(kernel, dim3(out.size() / inner), ceil_div(inner / piece, 32) * 32, 0, params);
              }};
}

}  // namespace mlx_cuda
