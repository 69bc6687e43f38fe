#include "decoding/sums.h"

#include "all_sum/all_sum.h"
#include "decoding/encoder.h"
#include "decoding/views.h"

#include <cstdint>
#include <string_view>
#include <unordered_set>
#include <utility>

namespace mlx_cuda {

namespace {

bool is_pending(const mx::array& in) {
  return in.status() == mx::array::Status::unscheduled && in.has_primitive();
}

// Whether this sum of one array can take in the other term of an addition, which nobody else reads it for.
bool takes_in(const mx::array& sum, const mx::array& other, const mx::array& add) {
  const auto is_alike = [&](const mx::array& in) { return in.shape() == add.shape() && in.dtype() == add.dtype(); };
  return is_pending(sum) && peers_of_sum(sum.primitive()) && sum.inputs().size() == 1 && uses(sum) == 1 && is_alike(sum) &&
         is_alike(other) && sum.primitive().stream() == add.primitive().stream();
}

}  // namespace

void sum_with_residuals(std::vector<mx::array> results) {
  std::unordered_set<std::uintptr_t> seen;
  while (!results.empty()) {
    mx::array next = std::move(results.back());
    results.pop_back();
    if (!is_pending(next) || !seen.insert(next.id()).second) {
      continue;
    }
    for (int term = 0; term < 2 && std::string_view(next.primitive().name()) == "Add"; ++term) {
      const mx::array& sum = next.inputs()[term];
      const mx::array& other = next.inputs()[1 - term];
      if (takes_in(sum, other, next)) {
        std::vector<mx::array> inputs{sum.inputs()[0], other};
        next.primitive_ptr() = sum.primitive_ptr();
        next.inputs() = std::move(inputs);
      }
    }
    results.insert(results.end(), next.inputs().begin(), next.inputs().end());
  }
}

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
