// Everything that mlx-cuda uses of MLX beyond its public interface: private members of its classes, and undocumented behavior. It
// holds for the one version of MLX that a build is made for and that the package requires; to move to another version, compare
// this file and mlx_internals.cpp with its sources. decoding/capture/self_test.h tests most of it before the first capture.
#pragma once

#include "runtime/arrays.h"

#include <cuda.h>
#include <mlx/backend/cuda/allocator.h>
#include <mlx/backend/cuda/device.h>
#include <mlx/primitives.h>
#include <mlx/stream.h>

#include <cstddef>
#include <memory>
#include <type_traits>
#include <vector>

namespace mlx_cuda {

// ---------------------------------------------------------------- arrays and their memory

// How many arrays are the same one: holders of array::array_desc_.
long uses(const mx::array& in);

// An object that lives as long as this array's memory is referenced.
std::weak_ptr<const void> lifetime_of(const mx::array& of);

// The deleter of memory that is not MLX's own: array::Data::deleter_.
const mx::allocator::Deleter& deleter_of(const mx::array& in);

// The identity of an array's memory; null if it has none. When the host reads an array, MLX copies its memory to managed memory
// (pinned memory, if the system has none), frees the old one, and puts the new address and device -1 into the same CudaBuffer.
const mx::cu::CudaBuffer* buffer_of(const mx::array& in);

// Whether the host can read that memory, and how it is freed is another way for that.
inline bool is_of_the_host(const mx::cu::CudaBuffer& buffer) {
  return buffer.device < 0;
}

// Allocates `out` by MLX's caching allocator, ordered on the stream. MLX does not export that allocator, but every primitive can
// be called through its vtable, and an elementwise one on no elements allocates its output and stops, without a node in the
// graph; all of the output, if its input is not contiguous. Whether it does is tested once (runtime/memory.cpp).
void allocate_by_mlx(mx::array& out, const mx::Stream& stream);

// ---------------------------------------------------------------- evaluation

// The stream that a primitive is encoded on: Primitive::stream_.
mx::Stream& stream_of(mx::Primitive& primitive);

// Encodes an array's primitive, with evaluated inputs, on another stream than its own. The outputs are not marked as evaluated,
// and nothing is kept until it has run. An input can be donated to an output only if it and its memory have no other references:
// arrays that are referenced elsewhere, or that are temporaries of the encoder, stay valid.
void encode_on(const mx::array& array, const mx::Stream& stream);

// Replaces a primitive's input after it has been encoded. MLX's gpu::eval reads the inputs again after eval_gpu, to keep their
// memory until the work has run, and has no other use for them.
void replace_input(const mx::array& in, mx::array by);

// ---------------------------------------------------------------- the graph that an encoder is building

struct DestroyGraph {
  void operator()(CUgraph graph) const {
    cuGraphDestroy(graph);
  }
};

// The nodes of an encoder since its last commit.
struct EncodedGraph {
  std::unique_ptr<std::remove_pointer_t<CUgraph>, DestroyGraph> graph{};  // null without nodes, as with MLX_USE_CUDA_GRAPHS=0
  std::size_t nodes = 0;
  std::vector<CUgraphNode> from{}, to{};  // its edges, which are not in the graph: MLX adds them as it commits
  std::vector<std::shared_ptr<mx::array::Data>> temporaries{};  // memory of the nodes besides the arrays of MLX's graph
};

// Takes that from the encoder, which is as after a commit then: MLX neither runs the nodes nor keeps an executable graph of them.
// Of CommandEncoder: graph_, from_nodes_, to_nodes_, temporaries_ and is_graph_updatable_.
EncodedGraph take_graph(CommandEncoder& encoder);

// Detects commits of an encoder during its lifetime. No eval_gpu of MLX's commits, only the evaluation around it; one that did
// would run the nodes before it, and leave the rest for a capture. Each commit, even an empty one, moves temporaries_.
class CommitWatch {
 public:
  explicit CommitWatch(CommandEncoder& encoder);
  CommitWatch(const CommitWatch&) = delete;
  CommitWatch& operator=(const CommitWatch&) = delete;
  ~CommitWatch();

  bool committed() const;

 private:
  CommandEncoder& encoder_;
  std::shared_ptr<mx::array::Data> mark_;  // the first temporary, until a commit
};

}  // namespace mlx_cuda
