// The part of MLX's graph that depends on a step's inputs, in the order in which it can be computed.
#pragma once

#include <cuda.h>
#include <mlx/array.h>
#include <mlx/stream.h>

#include <vector>

namespace mlx_cuda {

namespace mx = mlx::core;

// The name of the primitives that give these inputs.
inline constexpr const char* kPlaced = "StepInput";

class Walk {
 public:
  explicit Walk(const mx::array& result);

  // What it uses and that depends on no input: it is computed once.
  const std::vector<mx::array>& constants() const {
    return constants_;
  }
  // Everything that is computed or used.
  const std::vector<mx::array>& arrays() const {
    return arrays_;
  }

  // Adds the kernels to the encoder of the stream, whatever stream the primitives were made for.
  void encode(const mx::Stream& stream);

 private:
  std::vector<mx::array> order_{};  // the first output of each primitive
  std::vector<mx::array> constants_{};
  std::vector<mx::array> arrays_{};
};

// Edges of a graph, whose form differs between CUDA's majors.
void add_edges(CUgraph graph, const std::vector<CUgraphNode>& from, const std::vector<CUgraphNode>& to);

}  // namespace mlx_cuda
