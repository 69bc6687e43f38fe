// The base of primitives that captured steps alone evaluate, and of which nobody asks derivatives.
#pragma once

#include "decoding/graph/capture_error.h"

#include <mlx/primitives.h>

#include <vector>

namespace mlx_cuda {

namespace mx = mlx::core;

class StepPrimitive : public mx::Primitive {
 public:
  using mx::Primitive::Primitive;

  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw CaptureError("[decode_step] A captured step runs on the GPU only.");
  }
};

}  // namespace mlx_cuda
