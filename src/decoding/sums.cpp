#include "decoding/sums.h"

#include "all_sum/all_sum.h"
#include "decoding/views.h"

namespace mlx_cuda {

Item all_sum_item(const Plan& plan, const Item& sum) {
  const mx::array& summed = sum.outputs[0];
  const auto peers = peers_of_sum(summed.primitive());
  const mx::array x = sum.inputs[0];
  const Item* add = reader_of(plan, summed);
  const auto other = add ? added_to(plan, *add, summed) : std::nullopt;
  std::vector<mx::array> inputs{x};
  if (other) {
    inputs.push_back(*other);
  }
  const mx::array result = other ? add->outputs[0] : summed;
  return {other ? "sum over GPUs + add" : "sum over GPUs", inputs, {result}, [=, out = result](const mx::Stream& stream) mutable {
            encode_all_sum(*peers, x, other, out, stream);
          }};
}

}  // namespace mlx_cuda
