#include "decoding/capture/edges.h"

#include "runtime/device_code.h"
#include "runtime/pdl.h"
#include "runtime/status.h"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <set>
#include <unordered_map>
#include <utility>

namespace mlx_cuda {

namespace {

bool is_kernel(CUgraphNode node) {
  CUgraphNodeType type{};
  MLX_CUDA_CHECK(cuGraphNodeGetType(node, &type));
  return type == CU_GRAPH_NODE_TYPE_KERNEL;
}

// The kernel of a node; null of another node.
CUfunction kernel_of(CUgraphNode node) {
  if (!is_kernel(node)) {
    return nullptr;
  }
  CUDA_KERNEL_NODE_PARAMS params{};
  MLX_CUDA_CHECK(cuGraphKernelNodeGetParams(node, &params));
  return params.func;
}

// Removes edges that others imply. They would turn a chain into forks, for whose kernels there is no PDL. Edges to a node come
// before those from it.
std::vector<std::pair<CUgraphNode, CUgraphNode>> reduced(const std::vector<CUgraphNode>& from, const std::vector<CUgraphNode>& to) {
  std::unordered_map<CUgraphNode, std::size_t> indices;
  for (std::size_t i = 0; i < from.size(); ++i) {
    indices.try_emplace(from[i], indices.size());
    indices.try_emplace(to[i], indices.size());
  }
  using Nodes = std::vector<bool>;
  std::vector<Nodes> before(indices.size(), Nodes(indices.size()));  // the nodes that each node comes after, also indirectly
  std::vector<std::set<std::size_t>> direct(indices.size());
  for (std::size_t i = 0; i < from.size(); ++i) {
    const std::size_t first = indices.at(from[i]);
    const std::size_t second = indices.at(to[i]);
    std::transform(
        before[first].begin(), before[first].end(), before[second].begin(), before[second].begin(), std::logical_or<bool>());
    before[second][first] = true;
    direct[second].insert(first);
  }
  std::vector<std::pair<CUgraphNode, CUgraphNode>> edges;
  for (std::size_t i = 0; i < from.size(); ++i) {
    const std::size_t first = indices.at(from[i]);
    auto& others = direct[indices.at(to[i])];
    const bool implied = std::any_of(others.begin(), others.end(), [&](std::size_t other) { return before[other][first]; });
    if (!implied && std::find(edges.begin(), edges.end(), std::pair(from[i], to[i])) == edges.end()) {
      edges.emplace_back(from[i], to[i]);
    }
  }
  return edges;
}

}  // namespace

void make_cooperative(CUgraph graph) {
  std::size_t count = 0;
  MLX_CUDA_CHECK(cuGraphGetNodes(graph, nullptr, &count));
  std::vector<CUgraphNode> nodes(count);
  MLX_CUDA_CHECK(cuGraphGetNodes(graph, nodes.data(), &count));
  for (CUgraphNode node : nodes) {
    if (needs_all_blocks(kernel_of(node))) {
      CUkernelNodeAttrValue value{};
      value.cooperative = 1;
      MLX_CUDA_CHECK(cuGraphKernelNodeSetAttribute(node, CU_LAUNCH_ATTRIBUTE_COOPERATIVE, &value));
    }
  }
}

void add_edges(CUgraph graph, const std::vector<CUgraphNode>& from, const std::vector<CUgraphNode>& to) {
  for (const auto& [first, second] : reduced(from, to)) {
    CUgraphEdgeData edge{};
    if (is_hopper() && has_pdl(kernel_of(second)) && is_kernel(first)) {
      edge.from_port = CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC;
      edge.type = CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC;
    }
    // In CUDA 12's headers the name without a number is that of a function without edge data.
    MLX_CUDA_CHECK(cuGraphAddDependencies_v2(graph, &first, &second, &edge, 1));
  }
}

}  // namespace mlx_cuda
