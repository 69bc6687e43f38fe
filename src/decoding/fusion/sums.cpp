#include "decoding/fusion/sums.h"

#include "all_sum/all_sum.h"
#include "decoding/graph/views.h"
#include "runtime/mlx_internals.h"

#include <cstdint>
#include <string_view>
#include <unordered_set>
#include <utility>

namespace mlx_cuda {

namespace {

bool is_pending(const mx::array& in) {
  return in.status() == mx::array::Status::unscheduled && in.has_primitive();
}

// Whether there are as many numbers in memory as elements, as far as that is known yet.
bool is_whole(const mx::array& in) {
  return is_pending(in) ? std::string_view(in.primitive().name()) != "Broadcast" : in.data_size() == in.size();
}

// Whether an array that has not been computed is made of another one.
bool depends_on(const mx::array& out, const mx::array& in) {
  std::unordered_set<std::uintptr_t> seen;
  std::vector<const mx::array*> rest{&out};
  while (!rest.empty()) {
    const mx::array* next = rest.back();
    rest.pop_back();
    if (next->id() == in.id()) {
      return true;
    }
    if (is_pending(*next) && seen.insert(next->id()).second) {
      for (const mx::array& each : next->inputs()) {
        rest.push_back(&each);
      }
    }
  }
  return false;
}

// Whether this all-reduce of one array can be fused with the other term of an addition, its only reader. Everything computed
// before the all-reduce stays, so that all processes do their all-reduces in the same order even if one of them does not fuse.
bool takes_in(const mx::array& sum, const mx::array& other, const mx::array& add) {
  const auto is_alike = [&](const mx::array& in) { return in.shape() == add.shape() && in.dtype() == add.dtype(); };
  return is_pending(sum) && peers_of_sum(sum.primitive()) && sum.inputs().size() == 1 && uses(sum) == 1 && is_alike(sum) &&
         is_alike(other) && is_whole(other) && sum.primitive().stream() == add.primitive().stream() &&
         (!is_pending(other) || depends_on(sum, other));
}

}  // namespace

void sum_with_residuals(Arrays results) {
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
        Arrays inputs{sum.inputs()[0], other};
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
  const bool has_other = sum.inputs.size() > 1;
  const Item* add = has_other ? nullptr : reader_of(plan, summed);
  const auto other = has_other ? std::optional(sum.inputs[1]) : add ? added_to(plan, *add, summed) : std::nullopt;
  Arrays inputs{x};
  if (other) {
    inputs.push_back(*other);
  }
  const mx::array result = add && other ? add->outputs[0] : summed;
  return {other ? "all-reduce + add" : "all-reduce", inputs, {result}, [=, out = result](const mx::Stream& stream) mutable {
            encode_all_sum(*peers, x, other, out, stream);
          }};
}

}  // namespace mlx_cuda
