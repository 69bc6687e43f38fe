// The error of a step that cannot be captured.
#pragma once

#include <exception>
#include <stdexcept>

namespace mlx_cuda {

// The step cannot be captured, or its captured graph cannot be prepared: none of the caller's arrays was consumed, so that the
// model can go on without a capture. Errors of the caller's arrays are raised as by MLX.
class CaptureError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Does what only a capture needs: whatever fails there is such an error.
template <typename F>
auto capturing(F&& work) {
  try {
    return work();
  } catch (const CaptureError&) {
    throw;
  } catch (const std::exception& error) {
    throw CaptureError(error.what());
  }
}

}  // namespace mlx_cuda
