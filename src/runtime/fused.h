// The base of the fused primitives: derivatives and vectorisation through a composition of MLX operations.
#pragma once

#include <mlx/backend/cuda/device.h>
#include <mlx/primitives.h>

#include <functional>
#include <utility>
#include <vector>

namespace mlx_cuda {

namespace mx = mlx::core;

class Fused : public mx::Primitive {
 public:
  using mx::Primitive::Primitive;

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) final;
  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) final;

  std::vector<mx::array> jvp(
      const std::vector<mx::array>& primals, const std::vector<mx::array>& tangents, const std::vector<int>& argnums) override;
  std::vector<mx::array> vjp(
      const std::vector<mx::array>& primals,
      const std::vector<mx::array>& cotangents,
      const std::vector<int>& argnums,
      const std::vector<mx::array>& outputs) override;
  std::pair<std::vector<mx::array>, std::vector<int>> vmap(
      const std::vector<mx::array>& inputs, const std::vector<int>& axes) override;

 protected:
  // The same results, as many as the primitive has, from MLX operations.
  virtual std::vector<mx::array> compose(const std::vector<mx::array>& inputs) const = 0;

  // Encodes the work; the base has made the device current.
  virtual void encode(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs, mx::cu::CommandEncoder& encoder) = 0;

  // The stream without the base's lack of const.
  mx::Stream queue() const {
    return const_cast<Fused*>(this)->stream();
  }
};

}  // namespace mlx_cuda
