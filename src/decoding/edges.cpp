#include "decoding/edges.h"

#include "runtime/device_code.h"
#include "runtime/early.h"
#include "runtime/status.h"

#include <cstddef>

namespace mlx_cuda {

namespace {

bool is_kernel(CUgraphNode node, bool that_begins_early) {
  CUgraphNodeType type{};
  MLX_CUDA_CHECK(cuGraphNodeGetType(node, &type));
  if (type != CU_GRAPH_NODE_TYPE_KERNEL || !that_begins_early) {
    return type == CU_GRAPH_NODE_TYPE_KERNEL;
  }
  CUDA_KERNEL_NODE_PARAMS params{};
  MLX_CUDA_CHECK(cuGraphKernelNodeGetParams(node, &params));
  return can_begin_early(params.func);
}

// The form of cuGraphAddDependencies that takes the edges' data, which drivers have from CUDA 12.3 on; null without it.
using AddDependencies = CUresult(CUDAAPI*)(CUgraph, const CUgraphNode*, const CUgraphNode*, const CUgraphEdgeData*, std::size_t);
AddDependencies with_data() {
  static const auto found = [] {
    void* address = nullptr;
    CUdriverProcAddressQueryResult result{};
    const CUresult status = cuGetProcAddress("cuGraphAddDependencies", &address, 12030, CU_GET_PROC_ADDRESS_DEFAULT, &result);
    return succeeded(status) && result == CU_GET_PROC_ADDRESS_SUCCESS ? reinterpret_cast<AddDependencies>(address) : nullptr;
  }();
  return found;
}

}  // namespace

void add_edges(CUgraph clone, const std::vector<cudaGraphNode_t>& from, const std::vector<cudaGraphNode_t>& to) {
  for (std::size_t i = 0; i < from.size(); ++i) {
    CUgraphNode first = nullptr;
    CUgraphNode second = nullptr;
    MLX_CUDA_CHECK(cuGraphNodeFindInClone(&first, from[i], clone));
    MLX_CUDA_CHECK(cuGraphNodeFindInClone(&second, to[i], clone));
    CUgraphEdgeData early{};
    early.from_port = CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC;
    early.type = CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC;
    if (with_data() && is_hopper() && is_kernel(second, true) && is_kernel(first, false)) {
      MLX_CUDA_CHECK(with_data()(clone, &first, &second, &early, 1));
    } else {
#if CUDA_VERSION >= 13000
      MLX_CUDA_CHECK(cuGraphAddDependencies(clone, &first, &second, nullptr, 1));
#else
      MLX_CUDA_CHECK(cuGraphAddDependencies(clone, &first, &second, 1));
#endif
    }
  }
}

}  // namespace mlx_cuda
