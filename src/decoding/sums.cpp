#include "decoding/sums.h"

#include "all_sum/all_sum.h"
#include "decoding/views.h"

namespace mlx_cuda {

std::optional<Item> all_sum_item(const Plan& plan, const Item& sum, const mx::Stream& stream) {
  const mx::array& summed = sum.outputs[0];
  const auto group = summed.has_primitive() ? group_of_sum(summed.primitive()) : std::nullopt;
  const auto peers = group ? peers_for(sum.inputs[0], *group, stream) : nullptr;
  if (!peers) {
    return std::nullopt;
  }
  const mx::array x = sum.inputs[0];
  const Item* add = reader_of(plan, summed);
  const auto other = add ? added_to(plan, *add, summed) : std::nullopt;
  std::vector<mx::array> inputs{x};
  if (other) {
    inputs.push_back(*other);
  }
  const mx::array result = other ? add->outputs[0] : summed;
  return Item{other ? "sum over GPUs + add" : "sum over GPUs", inputs, {result}, [=, out = result](const mx::Stream& on) mutable {
                encode_all_sum(*peers, x, other, out, on);
              }};
}

}  // namespace mlx_cuda
