// The base of the fused primitives: gradients and vmap through a composition of MLX operations.
#pragma once

#include "runtime/arrays.h"

#include <mlx/backend/cuda/device.h>
#include <mlx/primitives.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace mlx_cuda {

class Unavailable;

// Registers a callback that gets the reason whenever a primitive falls back to MLX operations because its engine is unavailable.
void on_unavailable(std::function<void(const Unavailable&)> handle);

// Whether the kernels that `ask` requires are available, for primitives without a fallback; the callback gets the reason.
bool are_available(const std::function<void()>& ask);

class Fused : public mx::Primitive {
 public:
  using mx::Primitive::Primitive;

  void eval_cpu(const Arrays& inputs, Arrays& outputs) final;
  void eval_gpu(const Arrays& inputs, Arrays& outputs) final;

  Arrays jvp(const Arrays& primals, const Arrays& tangents, const std::vector<int>& argnums) override;
  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums, const Arrays& outputs) override;
  std::pair<Arrays, std::vector<int>> vmap(const Arrays& inputs, const std::vector<int>& axes) override;

 protected:
  // The same results, as many as the primitive has, from MLX operations: the definition of gradients and vmap.
  virtual Arrays compose(const Arrays& inputs) const = 0;

  // Whether that can replace the primitive. It cannot if it raises, has the right gradients but not the right values, or is the
  // same primitive again.
  virtual bool is_composable() const {
    return true;
  }

  // Encodes the work; the base has made the device current.
  virtual void encode(const Arrays& inputs, Arrays& outputs, CommandEncoder& encoder) = 0;

  // The stream without the base's lack of const.
  mx::Stream queue() const {
    return const_cast<Fused*>(this)->stream();
  }
};

// A primitive that differs from others of its class by its state only: something that can be compared.
template <typename State, typename Base = Fused>
class Stateful : public Base {
 public:
  Stateful(const mx::Stream& stream, State state) : Base(stream), state_(std::move(state)) {}

  bool is_equivalent(const mx::Primitive& other) const override {
    return state_ == static_cast<const Stateful&>(other).state_;
  }

 protected:
  const State state_;
};

// The results of a primitive, of the shapes that it says and all of one dtype.
template <typename P, typename... State>
Arrays results_of(const Arrays& inputs, mx::Dtype dtype, const mx::Stream& stream, const State&... state) {
  auto primitive = std::make_shared<P>(stream, state...);
  std::vector<mx::Shape> shapes = primitive->output_shapes(inputs);
  const std::vector<mx::Dtype> dtypes(shapes.size(), dtype);
  return mx::array::make_arrays(std::move(shapes), dtypes, primitive, inputs);
}

// The same of a primitive that has one.
template <typename P, typename... State>
mx::array result_of(Arrays inputs, mx::Dtype dtype, const mx::Stream& stream, const State&... state) {
  auto primitive = std::make_shared<P>(stream, state...);
  mx::Shape shape = primitive->output_shapes(inputs)[0];
  return {std::move(shape), dtype, std::move(primitive), std::move(inputs)};
}

// vmap of an operation with one result, from one entry of the batch after another.
std::pair<Arrays, std::vector<int>> vmap_in_turn(
    const Arrays& inputs,
    const std::vector<int>& axes,
    const std::function<mx::array(const Arrays&)>& apply,
    const mx::Stream& stream);

// vmap of what takes and gives arrays whose first dimension is the batch: the entries of the new axis are more of it.
std::pair<Arrays, std::vector<int>> vmap_as_batch(
    const Arrays& inputs,
    const std::vector<int>& axes,
    const std::function<Arrays(const Arrays&)>& apply,
    const mx::Stream& stream);

}  // namespace mlx_cuda
