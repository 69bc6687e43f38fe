#include "matmul/grouped/primitive.h"

#include "matmul/grouped/bilinear.h"
#include "matmul/grouped/plan.h"
#include "runtime/memory.h"

#include <mlx/ops.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace mlx_cuda {

namespace {

class GroupedMatmul final : public Bilinear {
 public:
  GroupedMatmul(const mx::Stream& stream, bool transpose) : Bilinear(stream), transpose_(transpose) {}

  const char* name() const override {
    return "GroupedMatmul";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    return transpose_ == static_cast<const GroupedMatmul&>(other).transpose_;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    return {{inputs[0].shape(0), inputs[1].shape(transpose_ ? 1 : 2)}};
  }

  std::vector<mx::array> vjp(
      const std::vector<mx::array>& primals,
      const std::vector<mx::array>& cotangents,
      const std::vector<int>& argnums,
      const std::vector<mx::array>&) override {
    const mx::array& x = primals[0];
    const mx::array& w = primals[1];
    const mx::array& offsets = primals[2];
    const mx::array& dy = cotangents[0];
    std::vector<mx::array> gradients;
    for (int argnum : argnums) {
      if (argnum == 0) {
        gradients.push_back(grouped_matmul(dy, w, offsets, !transpose_, queue()));
      } else if (argnum == 1) {
        gradients.push_back(grouped_gradient(transpose_ ? x : dy, transpose_ ? dy : x, offsets, w.shape(0), queue()));
      } else {
        gradients.push_back(mx::zeros_like(offsets, queue()));
      }
    }
    return gradients;
  }

 protected:
  mx::array apply(const std::vector<mx::array>& inputs) const override {
    return grouped_matmul(inputs[0], inputs[1], inputs[2], transpose_, queue());
  }

  void encode(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs, mx::cu::CommandEncoder& encoder) override {
    const int groups = inputs[1].shape(0);
    const mx::array x = as_rows(inputs[0], encoder, stream());
    const GroupedWeights weights = as_weights(inputs[1], transpose_, encoder, stream());
    const mx::array offsets = inputs[2].flags().row_contiguous ? inputs[2] : contiguous_copy(inputs[2], encoder, stream());
    allocate(outputs[0], stream());
    if (outputs[0].size() > 0) {
      encode_grouped({x, offsets, std::nullopt, offsets.shape(0) > groups}, weights, 0, groups, outputs[0], encoder);
    }
  }

 private:
  bool transpose_;
};

class GroupedGradient final : public Bilinear {
 public:
  GroupedGradient(const mx::Stream& stream, int groups) : Bilinear(stream), groups_(groups) {}

  const char* name() const override {
    return "GroupedGradient";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    return groups_ == static_cast<const GroupedGradient&>(other).groups_;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    return {{groups_, inputs[1].shape(1), inputs[0].shape(1)}};
  }

  std::vector<mx::array> vjp(
      const std::vector<mx::array>& primals,
      const std::vector<mx::array>& cotangents,
      const std::vector<int>& argnums,
      const std::vector<mx::array>&) override {
    const mx::array& offsets = primals[2];
    std::vector<mx::array> gradients;
    for (int argnum : argnums) {
      gradients.push_back(
          argnum == 0   ? grouped_matmul(primals[1], cotangents[0], offsets, false, queue())
          : argnum == 1 ? grouped_matmul(primals[0], cotangents[0], offsets, true, queue())
                        : mx::zeros_like(offsets, queue()));
    }
    return gradients;
  }

 protected:
  mx::array apply(const std::vector<mx::array>& inputs) const override {
    return grouped_gradient(inputs[0], inputs[1], inputs[2], groups_, queue());
  }

  void encode(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs, mx::cu::CommandEncoder& encoder) override {
    const mx::array x = as_rows(inputs[0], encoder, stream());
    const mx::array y = as_rows(inputs[1], encoder, stream());
    const mx::array offsets = inputs[2].flags().row_contiguous ? inputs[2] : contiguous_copy(inputs[2], encoder, stream());
    allocate(outputs[0], stream());
    if (outputs[0].size() > 0) {
      encode_grouped_gradient({x, offsets, std::nullopt, offsets.shape(0) > groups_}, y, groups_, outputs[0], encoder);
    }
  }

 private:
  int groups_;
};

class ExpertOffsets final : public Fused {
 public:
  ExpertOffsets(const mx::Stream& stream, int groups) : Fused(stream), groups_(groups) {}

  const char* name() const override {
    return "ExpertOffsets";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    return groups_ == static_cast<const ExpertOffsets&>(other).groups_;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>&) override {
    return {{groups_ + 1}};
  }

 protected:
  std::vector<mx::array> compose(const std::vector<mx::array>& inputs) const override {
    const mx::array group = mx::reshape(mx::arange(groups_ + 1, mx::uint32, queue()), {groups_ + 1, 1}, queue());
    const mx::array before = mx::less(mx::reshape(inputs[0], {1, inputs[0].shape(0)}, queue()), group, queue());
    return {mx::sum(mx::astype(before, mx::int32, queue()), 1, false, queue())};
  }

  void encode(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs, mx::cu::CommandEncoder& encoder) override {
    const mx::array indices = inputs[0].flags().row_contiguous ? inputs[0] : contiguous_copy(inputs[0], encoder, stream());
    allocate(outputs[0], stream());
    encode_offsets(indices, groups_, outputs[0], encoder);
  }

 private:
  int groups_;
};

}  // namespace

mx::array in_units(const mx::array& in, int axis, const mx::Stream& stream) {
  const int more = (8 - in.shape(axis) % 8) % 8;
  return more == 0 ? in : mx::pad(in, {axis}, {0}, {more}, mx::array(0, in.dtype()), "constant", stream);
}

mx::array grouped_matmul(
    const mx::array& x, const mx::array& w, const mx::array& offsets, bool transpose, const mx::Stream& stream) {
  const mx::Shape shape{x.shape(0), w.shape(transpose ? 1 : 2)};
  std::vector<mx::array> inputs{in_units(x, 1, stream), in_units(w, transpose ? 2 : 1, stream), offsets};
  return mx::array(shape, x.dtype(), std::make_shared<GroupedMatmul>(stream, transpose), std::move(inputs));
}

mx::array grouped_gradient(const mx::array& x, const mx::array& y, const mx::array& offsets, int groups, const mx::Stream& stream) {
  std::vector<mx::array> inputs{in_units(x, 1, stream), in_units(y, 1, stream), offsets};
  const mx::Shape shape{groups, inputs[1].shape(1), inputs[0].shape(1)};
  const mx::array out(shape, x.dtype(), std::make_shared<GroupedGradient>(stream, groups), std::move(inputs));
  const mx::Shape wanted{groups, y.shape(1), x.shape(1)};
  return shape == wanted ? out : mx::slice(out, {0, 0, 0}, wanted, stream);
}

mx::array expert_offsets(const mx::array& sorted_indices, int groups, const mx::Stream& stream) {
  return mx::array({groups + 1}, mx::int32, std::make_shared<ExpertOffsets>(stream, groups), {sorted_indices});
}

}  // namespace mlx_cuda
