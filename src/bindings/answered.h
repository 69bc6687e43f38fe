// The calls that Python has checked and sent to the fused path.
//
// Checking shapes and choosing an engine in Python costs some microseconds a call, more than MLX takes to build a node of its
// graph. So a call of the same shapes, dtypes and options as one before goes straight to its primitive (`…_again` of the bindings);
// any other gives None, and Python looks at it.
#pragma once

#include "runtime/lru.h"

#include <mlx/array.h>
#include <mlx/device.h>
#include <mlx/stream.h>

#include <optional>

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

// Everything of the arrays that a decision may depend on, and the stream.
template <typename... Arrays>
Key call_key(const mlx::core::Stream& stream, const Arrays&... arrays) {
  Key key(stream.index, stream.device.type, stream.device.index);
  auto add = [&key](const mlx::core::array& in) {
    key.add(in.dtype().val());
    key.add(in.ndim());
    for (const auto size : in.shape()) {
      key.add(size);
    }
  };
  (add(arrays), ...);
  return key;
}

// The stream that MLX's own operations would run on.
inline mlx::core::Stream resolve(const std::optional<mlx::core::Stream>& stream) {
  return stream ? *stream : mlx::core::default_stream(mlx::core::default_device());
}

}  // namespace mlx_cuda
