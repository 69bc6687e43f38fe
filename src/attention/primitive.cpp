#include "attention/primitive.h"

#include "runtime/memory.h"

#include <cstdint>
#include <utility>

namespace mlx_cuda {

GivenArrays add_optional(const AttentionArrays& in, Arrays& inputs) {
  GivenArrays given{};
  for (std::size_t i = 0; i < kOptionalArrays.size(); ++i) {
    if (const auto& array = in.*kOptionalArrays[i]) {
      given[i] = true;
      inputs.push_back(*array);
    }
  }
  return given;
}

AttentionArrays with_optional(AttentionArrays in, const GivenArrays& given, const Arrays& inputs, std::size_t next) {
  for (std::size_t i = 0; i < kOptionalArrays.size(); ++i) {
    if (given[i]) {
      in.*kOptionalArrays[i] = inputs[next++];
    }
  }
  return in;
}

std::vector<mx::Shape> AttentionPrimitive::output_shapes(const Arrays& inputs) {
  return attention_shapes(inputs[0], inputs[2].shape(3), options().lse);
}

AttentionArrays AttentionPrimitive::arrays(const Arrays& inputs) const {
  return with_optional({inputs[0], inputs[1], inputs[2]}, state_.given, inputs, 3);
}

Arrays attention_results(std::shared_ptr<mx::Primitive> primitive, const Arrays& inputs) {
  std::vector<mx::Shape> shapes = primitive->output_shapes(inputs);
  std::vector<mx::Dtype> dtypes(shapes.size(), mx::float32);
  dtypes[0] = inputs[0].dtype();
  return mx::array::make_arrays(std::move(shapes), dtypes, std::move(primitive), inputs);
}

std::vector<mx::Shape> attention_shapes(const mx::array& q, int value_dim, bool lse) {
  const mx::Shape rows{q.shape(0), q.shape(1), q.shape(2)};
  mx::Shape out = rows;
  out.push_back(value_dim);
  return lse ? std::vector{out, rows} : std::vector{out};
}

void allocate_like_queries(mx::array& out, const mx::array& q, const mx::Stream& stream) {
  const std::int64_t heads = q.shape(1);
  const std::int64_t queries = q.shape(2);
  if (queries > 1 && heads > 1 && q.strides(1) == q.shape(3) && q.strides(2) == heads * q.shape(3)) {
    const std::int64_t dim = out.shape(3);
    allocate(out, {queries * heads * dim, dim, heads * dim, 1}, stream);
  } else {
    allocate(out, stream);
  }
}

}  // namespace mlx_cuda
