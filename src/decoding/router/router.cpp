#include "decoding/router/router.h"

#include "decoding/graph/views.h"
#include "runtime/device_code.h"
#include "runtime/kernel_table.h"
#include "runtime/memory.h"
#include "runtime/node.h"
#include "runtime/pdl.h"

#include <mlx/primitives.h>

namespace mlx_cuda {

namespace {

constexpr auto kKernels = std::to_array<KernelRow<std::string_view>>({MLX_CUDA_ROUTER_KERNELS(MLX_CUDA_KERNEL_ROW)});

// The experts that are best by their scores, as an argpartition and a slice of it.
struct Best {
  mx::array scores;  // of all experts
  bool first_of_equals;
};

std::optional<Best> best_of(const Plan& plan, const mx::array& chosen) {
  const Item* slice = given_by(plan, chosen, "Slice");
  const Item* partition = slice ? given_by(plan, source_of(plan, slice->inputs[0]), "ArgPartition") : nullptr;
  if (!partition) {
    return std::nullopt;
  }
  const mx::array& order = partition->outputs[0];
  const int experts = order.shape(-1);
  const int count = chosen.shape(-1);
  const auto [start, end, strides] = static_cast<const mx::Slice&>(chosen.primitive()).state();
  const auto [kth, axis] = static_cast<const mx::ArgPartition&>(order.primitive()).state();
  const mx::array given = source_of(plan, partition->inputs[0]);
  const Item* negative = given_by(plan, given, "Negative");
  const int first = negative ? 0 : experts - count;
  const int boundary = negative ? count - 1 : experts - count;
  const bool matches = axis == static_cast<int>(order.ndim()) - 1 && kth == boundary && start.back() == first &&
                       strides.back() == 1 && order.size() == static_cast<std::size_t>(experts) &&
                       chosen.size() == static_cast<std::size_t>(count);
  return matches ? std::optional(Best{negative ? source_of(plan, negative->inputs[0]) : given, negative != nullptr}) : std::nullopt;
}

bool is_picked(const Plan& plan, const mx::array& picked, const mx::array& scores, const mx::array& chosen) {
  const Item* gather = given_by(plan, picked, "GatherAxis");
  return gather && source_of(plan, gather->inputs[0]).id() == scores.id() &&
         source_of(plan, gather->inputs[1]).id() == chosen.id() &&
         static_cast<const mx::GatherAxis&>(picked.primitive()).state() == static_cast<int>(gather->inputs[0].ndim()) - 1;
}

// The function of the chosen scores; none if it is another one.
std::optional<RouterScores> made_of(const Plan& plan, const mx::array& result, const mx::array& scores, const mx::array& chosen) {
  if (is_picked(plan, result, scores, chosen)) {
    return RouterScores::plain;
  }
  if (const Item* softmax = given_by(plan, result, "Softmax")) {
    return is_picked(plan, source_of(plan, softmax->inputs[0]), scores, chosen) ? std::optional(RouterScores::softmax)
                                                                                : std::nullopt;
  }
  const Item* divide = given_by(plan, result, "Divide");
  if (!divide) {
    return std::nullopt;
  }
  const mx::array picked = source_of(plan, divide->inputs[0]);
  const Item* broadcast = given_by(plan, divide->inputs[1], "Broadcast");
  const Item* sum = given_by(plan, source_of(plan, broadcast ? broadcast->inputs[0] : divide->inputs[1]), "Sum");
  return sum && sum->outputs[0].size() == 1 && source_of(plan, sum->inputs[0]).id() == picked.id() &&
                 is_picked(plan, picked, scores, chosen)
             ? std::optional(RouterScores::normalised)
             : std::nullopt;
}

}  // namespace

std::optional<RouterCall> router_call(const Plan& plan, const mx::array& chosen, const mx::array& scores) {
  const auto best = best_of(plan, chosen);
  const auto after = best ? made_of(plan, scores, best->scores, chosen) : std::nullopt;
  if (!after || chosen.dtype() != mx::uint32 || best->scores.dtype() != scores.dtype() ||
      best->scores.size() > RouterParams::kMostExperts || chosen.size() > RouterParams::kMostChosen) {
    return std::nullopt;
  }
  const Item* softmax = given_by(plan, best->scores, "Softmax");
  const mx::array logits = softmax ? source_of(plan, softmax->inputs[0]) : best->scores;
  if (logits.dtype() != scores.dtype()) {
    return std::nullopt;
  }
  RouterParams params{};
  params.experts = static_cast<int>(logits.size());
  params.count = static_cast<int>(chosen.size());
  params.first_of_equals = best->first_of_equals;
  params.before = softmax ? RouterScores::softmax : RouterScores::plain;
  params.after = *after;
  return RouterCall{params, logits, chosen, scores};
}

Item router_item(const RouterCall& call) {
  return {"router", {call.logits}, {call.chosen, call.scores}, [call = call](const mx::Stream& stream) mutable {
            auto& encoder = mx::cu::get_command_encoder(stream);
            const mx::array logits = contiguous(call.logits, encoder, stream);
            allocate(call.chosen, stream);
            allocate(call.scores, stream);
            KernelNode node(encoder);
            RouterParams params = call.params;
            params.logits = node.reads(logits);
            params.chosen = node.writes<unsigned>(call.chosen);
            params.scores = node.writes(call.scores);
            static KernelModule kernels("router");
            CUfunction kernel = with_pdl(kernels.function(kernel_for(kKernels, type_name(call.scores.dtype()))));
            node.launch(kernel, dim3(1), 32, 0, params);
          }};
}

}  // namespace mlx_cuda
