#include "matmul/grouped/bilinear.h"
#include "matmul/grouped/plan.h"
#include "matmul/grouped/primitive.h"
#include "runtime/memory.h"

#include <mlx/ops.h>

#include <memory>
#include <utility>
#include <vector>

namespace mlx_cuda {

namespace {

// Of each pair, its matrix of x.
mx::array matrices_of(const mx::array& x, const std::optional<mx::array>& lhs, const mx::array& rhs, const mx::Stream& on) {
  if (lhs) {
    return *lhs;
  }
  const int repeats = rhs.shape(0) / x.shape(0);
  return mx::floor_divide(mx::arange(rhs.shape(0), mx::uint32, on), mx::array(repeats, mx::uint32), on);
}

class GatherMatmul final : public Bilinear {
 public:
  GatherMatmul(const mx::Stream& stream, bool transpose, bool sorted) : Bilinear(stream), transpose_(transpose), sorted_(sorted) {}

  const char* name() const override {
    return "GatherMatmul";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& that = static_cast<const GatherMatmul&>(other);
    return transpose_ == that.transpose_ && sorted_ == that.sorted_;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    return {{inputs[2].shape(0), inputs[0].shape(1), inputs[1].shape(transpose_ ? 1 : 2)}};
  }

  std::vector<mx::array> vjp(
      const std::vector<mx::array>& primals,
      const std::vector<mx::array>& cotangents,
      const std::vector<int>& argnums,
      const std::vector<mx::array>&) override {
    std::vector<mx::array> gradients;
    for (int argnum : argnums) {
      gradients.push_back(
          argnum == 0   ? x_gradient(primals, cotangents[0])
          : argnum == 1 ? weight_gradient(primals, cotangents[0])
                        : mx::zeros_like(primals[argnum], queue()));
    }
    return gradients;
  }

 protected:
  mx::array apply(const std::vector<mx::array>& inputs) const override {
    return gather_mm(inputs[0], inputs[1], lhs_of(inputs), inputs[2], transpose_, sorted_, queue());
  }

  void encode(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs, mx::cu::CommandEncoder& encoder) override {
    auto contiguous = [&](const mx::array& in) { return in.flags().row_contiguous ? in : contiguous_copy(in, encoder, stream()); };
    // Rows are read 16 bytes at a time.
    const mx::array x = rows_readable(inputs[0]) ? contiguous(inputs[0]) : contiguous_copy(inputs[0], encoder, stream());
    const mx::array rhs = contiguous(inputs[2]);
    std::optional<mx::array> lhs;
    if (inputs.size() > 3) {
      lhs = contiguous(inputs[3]);
    }
    const GroupedWeights weights = as_weights(inputs[1], transpose_, encoder, stream());
    allocate(outputs[0], stream());
    if (few_takes(x, rhs, weights)) {
      encode_grouped_few(x, lhs, rhs, weights, outputs[0], encoder);
      return;
    }
    const int groups = weights.array.shape(0);
    const GroupedRows rows = group_rows(x, lhs, rhs, groups, sorted_, encoder, stream());
    encode_grouped(rows, weights, 0, groups, outputs[0], encoder);
  }

 private:
  std::optional<mx::array> lhs_of(const std::vector<mx::array>& inputs) const {
    return inputs.size() > 3 ? std::optional(inputs[3]) : std::nullopt;
  }

  mx::array x_gradient(const std::vector<mx::array>& primals, const mx::array& cotangent) const {
    const mx::array& x = primals[0];
    const mx::array& rhs = primals[2];
    const mx::array each = gather_mm(cotangent, primals[1], std::nullopt, rhs, !transpose_, sorted_, queue());
    if (const auto lhs = lhs_of(primals)) {
      const mx::array updates = mx::expand_dims(mx::astype(each, mx::float32, queue()), 1, queue());
      const mx::array sums = mx::scatter_add(mx::zeros(x.shape(), mx::float32, queue()), *lhs, updates, 0, queue());
      return mx::astype(sums, x.dtype(), queue());
    }
    const mx::Shape shape{x.shape(0), rhs.shape(0) / x.shape(0), x.shape(1), x.shape(2)};
    return mx::sum(mx::reshape(each, shape, queue()), 1, false, queue());
  }

  mx::array weight_gradient(const std::vector<mx::array>& primals, const mx::array& cotangent) const {
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
    return transpose_ ? grouped_gradient(x_rows, dy_rows, offsets, groups, queue())
                      : grouped_gradient(dy_rows, x_rows, offsets, groups, queue());
  }

  bool transpose_;
  bool sorted_;
};

}  // namespace

mx::array gather_mm(
    const mx::array& x,
    const mx::array& w,
    const std::optional<mx::array>& lhs,
    const mx::array& rhs,
    bool transpose,
    bool sorted,
    const mx::Stream& stream) {
  const mx::Shape shape{rhs.shape(0), x.shape(1), w.shape(transpose ? 1 : 2)};
  std::vector<mx::array> inputs{in_units(x, 2, stream), in_units(w, transpose ? 2 : 1, stream), rhs};
  if (lhs) {
    inputs.push_back(*lhs);
  }
  return mx::array(shape, x.dtype(), std::make_shared<GatherMatmul>(stream, transpose, sorted), std::move(inputs));
}

}  // namespace mlx_cuda
