#include "attention/cudnn/primitive.h"

#include "runtime/capture.h"
#include "runtime/memory.h"

#include <mlx/backend/cuda/utils.h>
#include <mlx/ops.h>

#include <cstdint>
#include <unordered_map>

namespace mlx_cuda {

bool encode_plan(ExecutionPlan& plan, const VariantPack& pack, CommandEncoder& encoder, const mx::Stream& stream) {
  if (!plan.ready()) {
    return false;
  }
  // Allocation may add a node to the graph, so it comes before this node's inputs and outputs are set.
  void* scratch = workspace(plan.workspace(), encoder, stream);
  std::unordered_map<std::int64_t, void*> pointers;
  auto point = [&](Uid uid, const mx::array& at) {
    pointers[static_cast<std::int64_t>(uid)] = const_cast<void*>(static_cast<const void*>(mx::gpu_ptr<void>(at)));
  };
  for (const auto& [uid, in] : pack.inputs) {
    encoder.set_input_array(in);
    point(uid, in);
  }
  for (const auto& [uid, out] : pack.outputs) {
    encoder.set_output_array(out);
    point(uid, out);
  }
  plan.set_stream(encoder.stream());
  Capture capture(encoder);
  plan.execute(pointers, scratch);
  capture.submit();
  return true;
}

mx::array to_float32(const mx::array& in, const mx::Stream& stream) {
  return mx::astype(in, mx::float32, stream);
}

std::pair<Arrays, std::vector<int>> Sdpa::vmap(const Arrays& inputs, const std::vector<int>& axes) {
  const bool sinks = inputs.size() > operands_;
  if (sinks && axes[operands_] >= 0) {
    return Fused::vmap(inputs, axes);
  }
  const Arrays batched(inputs.begin(), inputs.begin() + static_cast<std::ptrdiff_t>(operands_));
  const auto apply = [&](const Arrays& flat) { return again(sinks ? joined(flat, inputs[operands_]) : flat); };
  return vmap_as_batch(batched, axes, apply, queue());
}

AttentionArrays Sdpa::arrays(const Arrays& inputs) const {
  const auto sinks = inputs.size() > operands_ ? std::optional(inputs[operands_]) : std::nullopt;
  return {.q = inputs[0], .k = inputs[1], .v = inputs[2], .sinks = sinks};
}

}  // namespace mlx_cuda
