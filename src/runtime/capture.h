// Captures library calls as one node of MLX's graph.
#pragma once

#include <cuda.h>
#include <mlx/backend/cuda/device.h>

#include "runtime/status.h"

namespace mlx_cuda {

// From its construction to submit(), what this thread puts on the encoder's stream becomes a graph, which submit() adds to the
// encoder's own. Without a submit() it is thrown away. MLX's CaptureContext does the same, but mlx.dll does not export it.
class Capture {
 public:
  explicit Capture(mlx::core::cu::CommandEncoder& encoder) : encoder_(encoder) {
    encoder.device().make_current();
    MLX_CUDA_CHECK(cuStreamBeginCapture(encoder.stream(), CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

  ~Capture() {
    if (!ended_) {
      cuStreamEndCapture(encoder_.stream(), &graph_);
    }
    if (graph_) {
      cuGraphDestroy(graph_);
    }
  }

  void submit() {
    ended_ = true;
    MLX_CUDA_CHECK(cuStreamEndCapture(encoder_.stream(), &graph_));
    encoder_.add_graph_node(graph_);
  }

 private:
  mlx::core::cu::CommandEncoder& encoder_;
  CUgraph graph_ = nullptr;
  bool ended_ = false;
};

}  // namespace mlx_cuda
