// Edges of a captured graph.
#pragma once

#include <cuda.h>

#include <vector>

namespace mlx_cuda {

// Makes kernels whose blocks wait for each other (runtime/pdl.h) cooperative launches.
void make_cooperative(CUgraph graph);

// Adds edges between nodes of a graph. Where the later kernel waits itself, it may begin before the earlier one has ended
// (runtime/pdl.h).
void add_edges(CUgraph graph, const std::vector<CUgraphNode>& from, const std::vector<CUgraphNode>& to);

}  // namespace mlx_cuda
