// The calls that Python has checked and sent to the fused path.
//
// Checking shapes and choosing an engine in Python costs some microseconds a call, more than MLX takes to build a node of its
// graph. So a call of the same shapes, dtypes and options as one before goes straight to its primitive (`…_again` of the bindings);
// any other gives None, and Python looks at it.
#pragma once

#include "runtime/lru.h"

namespace mlx_cuda {

class Answered {
 public:
  void remember(const Key& key) {
    calls_.get(key, [] { return true; });
  }

  bool holds(const Key& key) {
    return calls_.find(key) != nullptr;
  }

 private:
  LruCache<bool> calls_{4096};
};

}  // namespace mlx_cuda
