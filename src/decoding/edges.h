// Edges of a recorded graph.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <vector>

namespace mlx_cuda {

// Adds to the clone of a graph the edges between nodes of that. Where the later kernel waits itself, it may begin before the
// earlier one has ended (runtime/early.h).
void add_edges(CUgraph clone, const std::vector<cudaGraphNode_t>& from, const std::vector<cudaGraphNode_t>& to);

}  // namespace mlx_cuda
