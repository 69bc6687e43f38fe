// The base of primitives that only captured steps evaluate, without gradients.
#pragma once

#include "decoding/graph/capture_error.h"
#include "runtime/arrays.h"

#include <mlx/primitives.h>

namespace mlx_cuda {

class StepPrimitive : public mx::Primitive {
 public:
  using mx::Primitive::Primitive;

  void eval_cpu(const Arrays&, Arrays&) override {
    throw CaptureError("[decode_step] A captured step runs on the GPU only.");
  }
};

}  // namespace mlx_cuda
