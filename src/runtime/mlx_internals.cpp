#include "runtime/mlx_internals.h"

#include "runtime/status.h"

#include <mlx/ops.h>

#include <exception>
#include <unordered_map>
#include <utility>

namespace mlx_cuda {

namespace {

// An explicit instantiation may name private members. There is one of each in a program, so it cannot be in a header.
template <typename Name, auto Member>
struct Open {
  friend constexpr auto member(Name) {
    return Member;
  }
};

struct ArrayDescriptor {};
struct DataDeleter {};
struct PrimitiveStream {};
struct EncoderGraph {};
struct GraphHandle {};
struct FromNodes {};
struct ToNodes {};
struct Temporaries {};
struct IsUpdatable {};
constexpr auto member(ArrayDescriptor);
constexpr auto member(DataDeleter);
constexpr auto member(PrimitiveStream);
constexpr auto member(EncoderGraph);
constexpr auto member(GraphHandle);
constexpr auto member(FromNodes);
constexpr auto member(ToNodes);
constexpr auto member(Temporaries);
constexpr auto member(IsUpdatable);
template struct Open<ArrayDescriptor, &mx::array::array_desc_>;
template struct Open<DataDeleter, &mx::array::Data::deleter_>;
template struct Open<PrimitiveStream, &mx::Primitive::stream_>;
template struct Open<EncoderGraph, &CommandEncoder::graph_>;
template struct Open<GraphHandle, &mx::CudaGraph::handle_>;
template struct Open<FromNodes, &CommandEncoder::from_nodes_>;
template struct Open<ToNodes, &CommandEncoder::to_nodes_>;
template struct Open<Temporaries, &CommandEncoder::temporaries_>;
template struct Open<IsUpdatable, &CommandEncoder::is_graph_updatable_>;

// A primitive of a public operation that is never evaluated itself, and an input without elements.
struct Borrowed {
  std::shared_ptr<mx::Primitive> primitive;
  Arrays inputs;
};

const Borrowed& borrowed(const mx::Stream& stream) {
  static thread_local std::unordered_map<int, Borrowed> all;
  Borrowed& one = all[stream.index];
  if (!one.primitive) {
    const mx::array number(1.0f);
    mx::array nothing({0}, number.dtype(), nullptr, {});
    nothing.copy_shared_buffer(number, {1}, {false, false, false}, 0);
    one.inputs.push_back(std::move(nothing));
    one.primitive = mx::negative(number, stream).primitive_ptr();
  }
  return one;
}

}  // namespace

std::weak_ptr<const void> lifetime_of(const mx::array& of) {
  return of.*member(ArrayDescriptor{});
}

long uses(const mx::array& in) {
  return (in.*member(ArrayDescriptor{})).use_count();
}

const mx::allocator::Deleter& deleter_of(const mx::array& in) {
  return (*in.data_shared_ptr()).*member(DataDeleter{});
}

const mx::cu::CudaBuffer* buffer_of(const mx::array& in) {
  return static_cast<const mx::cu::CudaBuffer*>(in.buffer().ptr());
}

void allocate_by_mlx(mx::array& out, const mx::Stream& stream) {
  const auto& [primitive, inputs] = borrowed(stream);
  if (out.has_primitive()) {
    Arrays outputs{out};
    primitive->eval_gpu(inputs, outputs);
    return;
  }
  Arrays outputs{mx::array(out.shape(), out.dtype(), primitive, {})};  // for its stream
  primitive->eval_gpu(inputs, outputs);
  out.copy_shared_buffer(outputs[0]);
}

mx::Stream& stream_of(mx::Primitive& primitive) {
  return primitive.*member(PrimitiveStream{});
}

void encode_on(const mx::array& array, const mx::Stream& stream) {
  mx::Stream& own = stream_of(array.primitive());
  const mx::Stream before = std::exchange(own, stream);
  try {
    Arrays outputs = array.outputs();
    array.primitive().eval_gpu(array.inputs(), outputs);
  } catch (...) {
    own = before;
    throw;
  }
  own = before;
}

void replace_input(const mx::array& in, mx::array by) {
  const_cast<mx::array&>(in) = std::move(by);
}

EncodedGraph take_graph(CommandEncoder& encoder) {
  EncodedGraph taken;
  CUgraph& graph = encoder.*member(EncoderGraph{}).*member(GraphHandle{});
  MLX_CUDA_CHECK(cuGraphGetNodes(graph, nullptr, &taken.nodes));
  CUgraph nothing = nullptr;
  if (taken.nodes > 0) {
    MLX_CUDA_CHECK(cuGraphCreate(&nothing, 0));
    taken.graph.reset(std::exchange(graph, nothing));
    taken.from = std::exchange(encoder.*member(FromNodes{}), {});
    taken.to = std::exchange(encoder.*member(ToNodes{}), {});
    encoder.*member(IsUpdatable{}) = false;  // otherwise MLX would cache an empty executable graph for these nodes
  }
  taken.temporaries = std::exchange(encoder.*member(Temporaries{}), {});
  try {
    encoder.commit();  // an empty one, by which MLX drops the nodes itself
  } catch (const std::exception&) {
    // The nodes are dropped all the same, and nothing is lost.
  }
  return taken;
}

CommitWatch::CommitWatch(CommandEncoder& encoder)
    : encoder_(encoder),
      mark_(
          std::make_shared<mx::array::Data>(mx::allocator::Buffer(nullptr), mx::allocator::Deleter([](mx::allocator::Buffer) {}))) {
  auto& temporaries = encoder.*member(Temporaries{});
  temporaries.insert(temporaries.begin(), mark_);
}

CommitWatch::~CommitWatch() {
  std::erase(encoder_.*member(Temporaries{}), mark_);
}

bool CommitWatch::committed() const {
  const auto& temporaries = encoder_.*member(Temporaries{});
  return temporaries.empty() || temporaries.front() != mark_;
}

}  // namespace mlx_cuda
