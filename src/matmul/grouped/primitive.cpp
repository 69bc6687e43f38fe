#include "matmul/grouped/primitive.h"

#include "matmul/grouped/bilinear.h"
#include "matmul/grouped/plan.h"
#include "runtime/memory.h"

#include <mlx/ops.h>

#include <vector>

namespace mlx_cuda {

namespace {

// Inputs: x, w and offsets.
class GroupedMatmul final : public Stateful<bool, Bilinear> {
 public:
  using Stateful::Stateful;
  DEFINE_NAME(GroupedMatmul)

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    return {{inputs[0].shape(0), inputs[1].shape(transpose_ ? 1 : 2)}};
  }

 protected:
  mx::array apply(const Arrays& inputs) const override {
    return grouped_matmul(inputs[0], inputs[1], inputs[2], transpose_, queue());
  }
  mx::array first_gradient(const Arrays& primals, const mx::array& dy) const override {
    return grouped_matmul(dy, primals[1], primals[2], !transpose_, queue());
  }
  mx::array second_gradient(const Arrays& primals, const mx::array& dy) const override {
    const mx::array& x = primals[0];
    return grouped_gradient(transpose_ ? x : dy, transpose_ ? dy : x, primals[2], primals[1].shape(0), queue());
  }

  void encode(const Arrays& inputs, Arrays& outputs, CommandEncoder& encoder) override {
    const int groups = inputs[1].shape(0);
    const mx::array x = as_rows(inputs[0], encoder, stream());
    const GroupedWeights weights = as_weights(inputs[1], transpose_, encoder, stream());
    const mx::array offsets = contiguous(inputs[2], encoder, stream());
    allocate(outputs[0], stream());
    if (outputs[0].size() > 0) {
      encode_grouped({x, offsets, std::nullopt, offsets.shape(0) > groups}, weights, 0, groups, outputs[0], encoder);
    }
  }

 private:
  const bool& transpose_ = state_;
};

// Inputs: x, y and offsets.
class GroupedGradient final : public Stateful<int, Bilinear> {
 public:
  using Stateful::Stateful;
  DEFINE_NAME(GroupedGradient)

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    return {{groups_, inputs[1].shape(1), inputs[0].shape(1)}};
  }

 protected:
  mx::array apply(const Arrays& inputs) const override {
    return grouped_gradient(inputs[0], inputs[1], inputs[2], groups_, queue());
  }
  mx::array first_gradient(const Arrays& primals, const mx::array& dw) const override {
    return grouped_matmul(primals[1], dw, primals[2], false, queue());
  }
  mx::array second_gradient(const Arrays& primals, const mx::array& dw) const override {
    return grouped_matmul(primals[0], dw, primals[2], true, queue());
  }

  void encode(const Arrays& inputs, Arrays& outputs, CommandEncoder& encoder) override {
    const mx::array x = as_rows(inputs[0], encoder, stream());
    const mx::array y = as_rows(inputs[1], encoder, stream());
    const mx::array offsets = contiguous(inputs[2], encoder, stream());
    allocate(outputs[0], stream());
    if (outputs[0].size() > 0) {
      encode_grouped_gradient({x, offsets, std::nullopt, offsets.shape(0) > groups_}, y, groups_, outputs[0], encoder);
    }
  }

 private:
  const int& groups_ = state_;
};

class ExpertOffsets final : public Stateful<int> {
 public:
  using Stateful::Stateful;
  DEFINE_NAME(ExpertOffsets)

  std::vector<mx::Shape> output_shapes(const Arrays&) override {
    return {{groups_ + 1}};
  }

 protected:
  Arrays compose(const Arrays& inputs) const override {
    const mx::array group = mx::reshape(mx::arange(groups_ + 1, mx::uint32, queue()), {groups_ + 1, 1}, queue());
    const mx::array before = mx::less(mx::reshape(inputs[0], {1, inputs[0].shape(0)}, queue()), group, queue());
    return {mx::sum(mx::astype(before, mx::int32, queue()), 1, false, queue())};
  }

  void encode(const Arrays& inputs, Arrays& outputs, CommandEncoder& encoder) override {
    const mx::array indices = contiguous(inputs[0], encoder, stream());
    allocate(outputs[0], stream());
    encode_offsets(indices, 1, groups_, outputs[0], encoder);
  }

 private:
  const int& groups_ = state_;
};

}  // namespace

mx::array in_units(const mx::array& in, int axis, const mx::Stream& stream) {
  const int more = (8 - in.shape(axis) % 8) % 8;
  return more == 0 ? in : mx::pad(in, {axis}, {0}, {more}, mx::array(0, in.dtype()), "constant", stream);
}

mx::array grouped_matmul(
    const mx::array& x, const mx::array& w, const mx::array& offsets, bool transpose, const mx::Stream& stream) {
  return result_of<GroupedMatmul>(
      {in_units(x, 1, stream), in_units(w, transpose ? 2 : 1, stream), offsets}, x.dtype(), stream, transpose);
}

mx::array grouped_gradient(const mx::array& x, const mx::array& y, const mx::array& offsets, int groups, const mx::Stream& stream) {
  const mx::array out =
      result_of<GroupedGradient>({in_units(x, 1, stream), in_units(y, 1, stream), offsets}, x.dtype(), stream, groups);
  const mx::Shape wanted{groups, y.shape(1), x.shape(1)};
  return out.shape() == wanted ? out : mx::slice(out, {0, 0, 0}, wanted, stream);
}

mx::array expert_offsets(const mx::array& sorted_indices, int groups, const mx::Stream& stream) {
  return result_of<ExpertOffsets>({sorted_indices}, mx::int32, stream, groups);
}

KernelName grouped_matmul_kernel(const mx::array& x, const mx::array& w, bool transpose) {
  return grouped_kernel(x.shape(0), w.shape(0), w.shape(transpose ? 1 : 2), is_read_not_transposed(w, transpose), x.dtype());
}

}  // namespace mlx_cuda
