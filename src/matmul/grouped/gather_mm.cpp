#include "matmul/grouped/bilinear.h"
#include "matmul/grouped/plan.h"
#include "matmul/grouped/primitive.h"
#include "runtime/memory.h"

#include <mlx/ops.h>

#include <utility>
#include <vector>

namespace mlx_cuda {

namespace {

// Of each pair, its matrix of x.
mx::array matrices_of(const mx::array& x, const MaybeArray& lhs, const mx::array& rhs, const mx::Stream& on) {
  if (lhs) {
    return *lhs;
  }
  const int repeats = rhs.shape(0) / x.shape(0);
  return mx::floor_divide(mx::arange(rhs.shape(0), mx::uint32, on), mx::array(repeats, mx::uint32), on);
}

struct GatherOptions {
  bool transpose;
  bool sorted;

  bool operator==(const GatherOptions&) const = default;
};

// Inputs: x, w, rhs and perhaps lhs.
class GatherMatmul final : public Stateful<GatherOptions, Bilinear> {
 public:
  using Stateful::Stateful;
  DEFINE_NAME(GatherMatmul)

  std::optional<GatheredRows> gathered_rows(const Arrays& inputs) const {
    const mx::array& x = inputs[0];
    const bool rows = x.shape(1) == 1 && (x.shape(0) == 1 || (!lhs_of(inputs) && x.shape(0) == inputs[2].shape(0)));
    return rows ? std::optional(GatheredRows{inputs[1], state_.transpose, inputs[2]}) : std::nullopt;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    return {{inputs[2].shape(0), inputs[0].shape(1), inputs[1].shape(state_.transpose ? 1 : 2)}};
  }

 protected:
  mx::array apply(const Arrays& inputs) const override {
    return gather_mm(inputs[0], inputs[1], lhs_of(inputs), inputs[2], state_.transpose, state_.sorted, queue());
  }

  mx::array first_gradient(const Arrays& primals, const mx::array& cotangent) const override {
    const mx::array& x = primals[0];
    const mx::array& rhs = primals[2];
    const mx::array each = gather_mm(cotangent, primals[1], std::nullopt, rhs, !state_.transpose, state_.sorted, queue());
    if (const auto lhs = lhs_of(primals)) {
      const mx::array updates = mx::expand_dims(mx::astype(each, mx::float32, queue()), 1, queue());
      const mx::array sums = mx::scatter_add(mx::zeros(x.shape(), mx::float32, queue()), *lhs, updates, 0, queue());
      return mx::astype(sums, x.dtype(), queue());
    }
    const mx::Shape shape{x.shape(0), rhs.shape(0) / x.shape(0), x.shape(1), x.shape(2)};
    return mx::sum(mx::reshape(each, shape, queue()), 1, false, queue());
  }

  mx::array second_gradient(const Arrays& primals, const mx::array& cotangent) const override {
    const mx::array& x = primals[0];
    const mx::array& rhs = primals[2];
    const int groups = primals[1].shape(0);
    // Rows in the order of their groups.
    const mx::array order = mx::argsort(rhs, queue());
    const mx::array lhs = mx::take(matrices_of(x, lhs_of(primals), rhs, queue()), order, queue());
    const mx::array first = expert_offsets(mx::take(rhs, order, queue()), groups, queue());
    const mx::array offsets = mx::multiply(first, mx::array(x.shape(1)), queue());
    const mx::array x_rows = mx::reshape(mx::take(x, lhs, 0, queue()), {-1, x.shape(2)}, queue());
    const mx::array dy_rows = mx::reshape(mx::take(cotangent, order, 0, queue()), {-1, cotangent.shape(2)}, queue());
    return state_.transpose ? grouped_gradient(x_rows, dy_rows, offsets, groups, queue())
                            : grouped_gradient(dy_rows, x_rows, offsets, groups, queue());
  }

  void encode(const Arrays& inputs, Arrays& outputs, CommandEncoder& encoder) override {
    // Rows are read 16 bytes at a time.
    const mx::array& x = inputs[0];
    const GatherPairs pairs{
        .x = rows_readable(x) ? contiguous(x, encoder, stream()) : contiguous_copy(x, encoder, stream()),
        .lhs = contiguous(lhs_of(inputs), encoder, stream()),
        .rhs = contiguous(inputs[2], encoder, stream()),
    };
    const GroupedWeights weights = as_weights(inputs[1], state_.transpose, encoder, stream());
    const int groups = weights.array.shape(0);
    allocate(outputs[0], stream());
    if (is_gather_mv(pairs.rows(), groups, weights.not_transposed)) {
      encode_gather_mv(pairs, weights, outputs[0], encoder);
    } else {
      encode_grouped(group_rows(pairs, groups, state_.sorted, encoder, stream()), weights, 0, groups, outputs[0], encoder);
    }
  }

 private:
  MaybeArray lhs_of(const Arrays& inputs) const {
    return inputs.size() > 3 ? std::optional(inputs[3]) : std::nullopt;
  }
};

}  // namespace

mx::array gather_mm(
    const mx::array& x,
    const mx::array& w,
    const MaybeArray& lhs,
    const mx::array& rhs,
    bool transpose,
    bool sorted,
    const mx::Stream& stream) {
  Arrays inputs = joined({in_units(x, 2, stream), in_units(w, transpose ? 2 : 1, stream), rhs}, lhs);
  return result_of<GatherMatmul>(std::move(inputs), x.dtype(), stream, GatherOptions{transpose, sorted});
}

std::optional<GatheredRows> gathered_rows(const mx::array& out) {
  const auto* own = dynamic_cast<const GatherMatmul*>(&out.primitive());
  return own ? own->gathered_rows(out.inputs()) : std::nullopt;
}

KernelName gather_mm_kernel(const mx::array& x, const mx::array& w, const mx::array& rhs, bool transpose) {
  const int rows = rhs.shape(0) * x.shape(1);
  const bool not_transposed = is_read_not_transposed(w, transpose);
  return is_gather_mv(rows, w.shape(0), not_transposed)
             ? gather_mv_kernel(x.dtype())
             : grouped_kernel(rows, w.shape(0), w.shape(transpose ? 1 : 2), not_transposed, x.dtype());
}

}  // namespace mlx_cuda
