#include "decoding/capture/self_test.h"

#include "decoding/capture/edges.h"
#include "decoding/graph/capture_error.h"
#include "runtime/faults.h"
#include "runtime/memory.h"
#include "runtime/mlx_internals.h"
#include "runtime/status.h"

#include <mlx/backend/cuda/utils.h>
#include <mlx/ops.h>
#include <mlx/version.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

namespace mlx_cuda {

namespace {

constexpr int kSize = 1024;

class Unexpected : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

void expect(bool holds, const char* otherwise) {
  if (!holds) {
    throw Unexpected(otherwise);
  }
}

void* address_of(const mx::array& in) {
  return mx::gpu_ptr<void>(in);
}

// Whether an array is 0, 1, 2 … times this, without MLX. The stream must be idle.
bool counts_by(float step, const mx::array& in) {
  std::vector<float> values(in.size());
  MLX_CUDA_CHECK(cuMemcpyDtoH(values.data(), reinterpret_cast<CUdeviceptr>(address_of(in)), in.nbytes()));
  for (int i = 0; i < static_cast<int>(values.size()); ++i) {
    if (values[i] != step * static_cast<float>(i)) {
      return false;
    }
  }
  return static_cast<int>(values.size()) == kSize;
}

void check_arrays(const mx::array& given) {
  struct Nothing {
    void operator()(mx::allocator::Buffer) const {}
  };
  const long before = uses(given);
  const mx::array same = given;
  expect(uses(given) == before + 1 && uses(same) == before + 1, "array_desc_ does not count the arrays that are one");
  mx::array other(given.shape(), given.dtype(), nullptr, {});
  other.set_data(mx::allocator::Data(given.data_shared_ptr()->buffer(), Nothing{}));
  expect(deleter_of(other).target<Nothing>() != nullptr, "deleter_ is not what memory was given with");
  const mx::cu::CudaBuffer* buffer = buffer_of(given);
  expect(
      buffer && buffer->data == address_of(given) && buffer->size >= given.nbytes() && buffer_of(other) == buffer,
      "a CudaBuffer does not say where an array lies");
}

// MLX moves the memory of an array that the host reads, which a captured graph does not know.
void check_moving(mx::array given) {
  const mx::cu::CudaBuffer* buffer = buffer_of(given);
  const void* before = buffer->data;
  const bool was_of_the_host = is_of_the_host(*buffer);
  const float last = given.data<float>()[kSize - 1];
  expect(
      last == kSize - 1 && buffer_of(given) == buffer && is_of_the_host(*buffer) && (was_of_the_host || buffer->data != before),
      "a CudaBuffer does not say that the host has read an array");
}

void check_commits(CommandEncoder& encoder) {
  const CommitWatch watch(encoder);
  expect(!watch.committed(), "temporaries_ does not hold what was put there");
  encoder.commit();
  expect(watch.committed(), "a commit does not hand temporaries_ over");
}

// A pointer among the arguments of a kernel's node.
void* argument(CUgraphNode node, int index) {
  CUDA_KERNEL_NODE_PARAMS params{};
  MLX_CUDA_CHECK(cuGraphKernelNodeGetParams(node, &params));
  return params.kernelParams ? *static_cast<void**>(params.kernelParams[index]) : nullptr;
}

// A copy, its negative by a primitive of MLX, and a copy of that: `arrays` are their inputs and outputs.
void check_nodes(const EncodedGraph& encoded, const Arrays& arrays) {
  expect(encoded.nodes == 3, "graph_ has not one node for each of three kernels");
  expect(encoded.from.size() == 2 && encoded.to.size() == 2, "from_nodes_ and to_nodes_ are not the edges of a chain");
  expect(encoded.to[0] == encoded.from[1] && encoded.from[0] != encoded.to[1], "from_nodes_ and to_nodes_ are not in their order");
  std::vector<CUgraphNode> nodes(encoded.nodes);
  std::size_t count = nodes.size();
  MLX_CUDA_CHECK(cuGraphGetNodes(encoded.graph.get(), nodes.data(), &count));
  for (const CUgraphNode node : {encoded.from[0], encoded.from[1], encoded.to[1]}) {
    expect(std::find(nodes.begin(), nodes.end(), node) != nodes.end(), "from_nodes_ and to_nodes_ are not nodes of graph_");
  }
  const CUgraphNode first = encoded.from[0];
  const CUgraphNode last = encoded.to[1];
  expect(
      argument(first, 0) == address_of(arrays[0]) && argument(first, 1) == address_of(arrays[1]),
      "the first node is another kernel");
  expect(
      argument(last, 0) == address_of(arrays[2]) && argument(last, 1) == address_of(arrays[3]), "the last node is another kernel");
  for (const int copy : {1, 3}) {
    const auto& held = encoded.temporaries;
    expect(
        std::find(held.begin(), held.end(), arrays[copy].data_shared_ptr()) != held.end(),
        "temporaries_ does not hold a temporary");
  }
}

void run(EncodedGraph encoded, CommandEncoder& encoder) {
  add_edges(encoded.graph.get(), encoded.from, encoded.to);
  CUgraphExec executable = nullptr;
  MLX_CUDA_CHECK(cuGraphInstantiate(&executable, encoded.graph.get(), 0));
  const CUresult launched = cuGraphLaunch(executable, encoder.stream());
  encoder.synchronize();
  cuGraphExecDestroy(executable);
  MLX_CUDA_CHECK(launched);
}

// `arrays`: those that the nodes use. The caller keeps them until the nodes have run.
void check(Arrays& arrays, CommandEncoder& encoder, const mx::Stream& stream) {
  arrays.push_back(mx::arange(0, kSize, mx::float32, stream));
  arrays[0].eval();
  check_arrays(arrays[0]);
  check_commits(encoder);

  arrays.push_back(contiguous_copy(arrays[0], encoder, stream));
  arrays.push_back(mx::negative(arrays[1], stream));
  mx::Primitive& primitive = arrays[2].primitive();
  expect(&stream_of(primitive) == &primitive.stream(), "stream_ is not a primitive's stream");
  encode_on(arrays[2], stream);
  arrays.push_back(contiguous_copy(arrays[2], encoder, stream));
  EncodedGraph encoded = take_graph(encoder);
  if (encoded.nodes == 0) {  // as with MLX_USE_CUDA_GRAPHS=0, where each kernel was launched
    return;
  }
  check_nodes(encoded, arrays);
  expect(!encoder.needs_commit() && take_graph(encoder).nodes == 0, "an encoder still has the nodes that were taken from it");
  MLX_CUDA_CHECK(cuMemsetD32Async(reinterpret_cast<CUdeviceptr>(address_of(arrays[3])), 1, kSize, encoder.stream()));
  encoder.synchronize();
  expect(!counts_by(-1, arrays[3]), "an encoder has launched the nodes that were taken from it");
  run(std::move(encoded), encoder);
  expect(counts_by(-1, arrays[3]), "a graph that was captured computes something else");

  arrays[3].set_status(mx::array::Status::available);
  arrays.push_back(mx::negative(arrays[3], stream));  // the encoder goes on as ever
  arrays[4].eval();
  encoder.synchronize();
  expect(counts_by(1, arrays[4]), "an encoder whose nodes were taken computes something else");
  check_moving(arrays[0]);
}

std::string refusal(const std::string& difference) {
  return "MLX differs inside from the MLX " + std::to_string(MLX_VERSION_MAJOR) + "." + std::to_string(MLX_VERSION_MINOR) + "." +
         std::to_string(MLX_VERSION_PATCH) + " that this build was made for: " + difference;
}

std::string tried(const mx::Stream& stream) {
  auto& encoder = mx::cu::get_command_encoder(stream);
  Arrays arrays;
  arrays.reserve(5);
  try {
    check(arrays, encoder, stream);
  } catch (const Unexpected& difference) {
    encoder.commit();
    encoder.synchronize();
    return refusal(difference.what());
  } catch (...) {
    encoder.commit();  // while there are the arrays that it writes to
    encoder.synchronize();
    throw;
  }
  encoder.synchronize();
  return "";
}

}  // namespace

std::string capture_refusal(const mx::Stream& stream) {
  auto& encoder = mx::cu::get_command_encoder(stream);
  encoder.device().make_current();
  encoder.commit();
  if (fault("internals")) {
    return refusal("a test says so");
  }
  return capturing([&] {
    static const std::string once = tried(stream);
    return once;
  });
}

}  // namespace mlx_cuda
