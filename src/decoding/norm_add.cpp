#include "decoding/norm_add.h"

#include "decoding/norm_add_params.h"
#include "decoding/views.h"
#include "runtime/device_code.h"
#include "runtime/early.h"
#include "runtime/memory.h"
#include "runtime/node.h"

#include <mlx/fast_primitives.h>

namespace mlx_cuda {

std::optional<Item> norm_add_item(const Plan& plan, const Item& norm) {
  constexpr int piece = NormAddParams::kPiece;
  const mx::array& normed = norm.outputs[0];
  const mx::array& x = norm.inputs[0];
  const mx::array& weight = norm.inputs[1];
  const Item* add = reader_of(plan, normed);
  const auto other = add ? added_to(plan, *add, normed) : std::nullopt;
  const int inner = normed.shape(-1);
  if (!other || !is_half(x.dtype()) || weight.dtype() != x.dtype() || weight.ndim() != 1 || weight.shape(0) != inner ||
      plan.giver(weight) || !weight.flags().row_contiguous || !on_16_bytes(weight) || inner % piece != 0 ||
      inner > piece * NormAddParams::kMostThreads) {
    return std::nullopt;
  }
  const float eps = static_cast<const mx::fast::RMSNorm&>(normed.primitive()).state().second;
  return Item{"norm + add", {x, *other}, add->outputs, [=, out = add->outputs[0]](const mx::Stream& stream) mutable {
                auto& encoder = mx::cu::get_command_encoder(stream);
                const mx::array given = contiguous_on_16_bytes(x, encoder, stream);
                const mx::array residual = contiguous_on_16_bytes(*other, encoder, stream);
                allocate(out, stream);
                NormAddParams params{};
                KernelNode node(encoder);
                params.x = node.reads(given);
                params.norm = node.reads(weight);
                params.added = node.reads(residual);
                params.out = node.writes(out);
                params.inner = inner;
                params.eps = eps;
                static KernelModule kernels("norm_add");
                CUfunction kernel = kernels.function("norm_add_" + type_name(out.dtype()));
                begins_early(kernel);
                node.launch(kernel, dim3(out.size() / inner), ceil_div(inner / piece, 32) * 32, 0, params);
              }};
}

}  // namespace mlx_cuda
