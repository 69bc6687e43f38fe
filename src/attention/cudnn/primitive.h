// Common parts of cuDNN's primitives.
#pragma once

#include "attention/cudnn/problem.h"
#include "attention/primitive.h"
#include "runtime/status.h"

#include <string>
#include <utility>
#include <vector>

namespace mlx_cuda {

// The arrays of a plan, by their tensors in its graph. They have memory.
struct VariantPack {
  using Tensors = std::vector<std::pair<Uid, mx::array>>;
  Tensors inputs;
  Tensors outputs;

  // Adds an input and returns its layout in memory.
  void read(Uid uid, const mx::array& in, SdpaProblem::Strides& strides) {
    strides = problem_strides(in);
    inputs.emplace_back(uid, in);
  }

  // The same of an output, which is given memory like that of `pattern`.
  void write(Uid uid, mx::array& out, const mx::array& pattern, SdpaProblem::Strides& strides, const mx::Stream& stream) {
    strides = allocate_like(out, pattern, stream);
    outputs.emplace_back(uid, out);
  }
};

// Encodes a plan. Returns false, with nothing encoded, when cuDNN cannot build it (which takes tens of milliseconds the first
// time).
bool encode_plan(ExecutionPlan& plan, const VariantPack& pack, CommandEncoder& encoder, const mx::Stream& stream);

mx::array to_float32(const mx::array& in, const mx::Stream& stream);

// Why this cuDNN on this GPU does not take the problem; empty when it does. Builds no plan (some milliseconds the first time).
template <typename Problem>
std::string why_unsupported(const Problem& problem, const mx::Stream& stream) {
  auto& device = mx::cu::device(stream.device);
  device.make_current();
  return find_plan(problem, device.cuda_device()).refusal();
}

inline const SdpaProblem& forward_of(const SdpaProblem& problem) {
  return problem;
}
inline const SdpaProblem& forward_of(const SdpaBackwardProblem& problem) {
  return problem.forward;
}

// Inputs: `operands` arrays whose first dimension is the batch, and perhaps sinks.
class Sdpa : public Stateful<AttentionOptions> {
 public:
  Sdpa(const mx::Stream& stream, const AttentionOptions& options, std::size_t operands)
      : Stateful(stream, options), operands_(operands) {}

  // A further batch dimension joins the batch.
  std::pair<Arrays, std::vector<int>> vmap(const Arrays& inputs, const std::vector<int>& axes) override;

 protected:
  // The same results for other inputs, fused where cuDNN takes them: more batches do not change whether it does, but both ways are
  // right.
  virtual Arrays again(const Arrays& inputs) const = 0;

  // q, k, v and the sinks.
  AttentionArrays arrays(const Arrays& inputs) const;

  const AttentionOptions& options() const {
    return state_;
  }

  // Encodes the problem with arrays from `bind(problem, dense)`: strided or, if cuDNN does not support the strides, dense, as was
  // assumed when the graph was built. Returns the encoded problem.
  template <typename Problem, typename Bind>
  std::pair<Problem, VariantPack> encode_problem(Problem problem, const char* what, const Bind& bind, CommandEncoder& encoder) {
    for (const bool dense : {false, true}) {
      VariantPack pack = bind(problem, dense);
      if (encode_plan(find_plan(problem, encoder.device().cuda_device()), pack, encoder, stream())) {
        return {problem, std::move(pack)};
      }
    }
    const std::string reason = why_unsupported(problem, stream());
    const SdpaProblem& sizes = forward_of(problem);
    throw Unavailable(
        std::string("[attention] cuDNN refused a ") + what + " of " + std::to_string(sizes.q_length) + " queries and " +
            std::to_string(sizes.kv_length) +
            " keys that it had accepted: " + (reason.empty() ? "there was no memory for its plan." : reason + '.'),
        !reason.empty());
  }

 private:
  std::size_t operands_;
};

}  // namespace mlx_cuda
