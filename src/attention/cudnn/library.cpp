#include "attention/cudnn/library.h"

#include "runtime/capture.h"

#include <mlx/backend/cuda/utils.h>

namespace mlx_cuda {

namespace {

bool encode(
    Plan& plan, const Operands& inputs, const Operands& outputs, mx::cu::CommandEncoder& encoder, const mx::Stream& stream) {
  if (!plan.ready()) {
    return false;
  }
  // Allocation may add a node of its own to the graph, so it comes before the inputs and outputs of ours are named.
  void* scratch = workspace(plan.workspace(), encoder, stream);
  std::unordered_map<std::int64_t, void*> pointers;
  for (const auto& [operand, in] : inputs) {
    encoder.set_input_array(in);
    pointers[static_cast<std::int64_t>(operand)] = const_cast<void*>(static_cast<const void*>(mx::gpu_ptr<void>(in)));
  }
  for (const auto& [operand, out] : outputs) {
    encoder.set_output_array(out);
    pointers[static_cast<std::int64_t>(operand)] = const_cast<void*>(static_cast<const void*>(mx::gpu_ptr<void>(out)));
  }
  plan.use(encoder.stream());
  Capture capture(encoder);
  plan.run(pointers, scratch);
  capture.submit();
  return true;
}

}  // namespace

std::string why_unsupported(const AttentionProblem& problem, mx::cu::Device& device) {
  return find_plan(problem, device.cuda_device()).refusal();
}

std::string why_unsupported(const AttentionBackwardProblem& problem, mx::cu::Device& device) {
  return find_plan(problem, device.cuda_device()).refusal();
}

bool encode_attention(
    const AttentionProblem& problem,
    const Operands& inputs,
    const Operands& outputs,
    mx::cu::CommandEncoder& encoder,
    const mx::Stream& stream) {
  return encode(find_plan(problem, encoder.device().cuda_device()), inputs, outputs, encoder, stream);
}

bool encode_attention(
    const AttentionBackwardProblem& problem,
    const Operands& inputs,
    const Operands& outputs,
    mx::cu::CommandEncoder& encoder,
    const mx::Stream& stream) {
  return encode(find_plan(problem, encoder.device().cuda_device()), inputs, outputs, encoder, stream);
}

}  // namespace mlx_cuda
