// What MLX's classes keep to themselves and a recording needs: the graph that an encoder is building, and the stream of a
// primitive. An explicit instantiation may name private members; this header does, and attention/paged/primitive.cpp
// (docs/decoding.md).
#pragma once

#include <cuda.h>
#include <mlx/backend/cuda/device.h>
#include <mlx/primitives.h>

#include <memory>
#include <vector>

namespace mlx_cuda {

namespace mx = mlx::core;

namespace opened {

template <typename Name, auto Member>
struct Open {
  friend constexpr auto member(Name) {
    return Member;
  }
};

struct Graph {};
struct FromNodes {};
struct ToNodes {};
struct Temporaries {};
struct OwnStream {};
struct Descriptor {};
constexpr auto member(Graph);
constexpr auto member(FromNodes);
constexpr auto member(ToNodes);
constexpr auto member(Temporaries);
constexpr auto member(OwnStream);
constexpr auto member(Descriptor);
template struct Open<Graph, &mx::cu::CommandEncoder::graph_>;
template struct Open<FromNodes, &mx::cu::CommandEncoder::from_nodes_>;
template struct Open<ToNodes, &mx::cu::CommandEncoder::to_nodes_>;
template struct Open<Temporaries, &mx::cu::CommandEncoder::temporaries_>;
template struct Open<OwnStream, &mx::Primitive::stream_>;
template struct Open<Descriptor, &mx::array::array_desc_>;

}  // namespace opened

// The nodes that were added since the last commit, whose edges are added by the commit only.
inline CUgraph graph_of(mx::cu::CommandEncoder& encoder) {
  return static_cast<cudaGraph_t>(encoder.*member(opened::Graph{}));
}
inline const std::vector<cudaGraphNode_t>& edges_from(mx::cu::CommandEncoder& encoder) {
  return encoder.*member(opened::FromNodes{});
}
inline const std::vector<cudaGraphNode_t>& edges_to(mx::cu::CommandEncoder& encoder) {
  return encoder.*member(opened::ToNodes{});
}
// What these nodes use besides the arrays of MLX's graph.
inline const std::vector<std::shared_ptr<mx::array::Data>>& temporaries_of(mx::cu::CommandEncoder& encoder) {
  return encoder.*member(opened::Temporaries{});
}
inline mx::Stream& stream_of(mx::Primitive& primitive) {
  return primitive.*member(opened::OwnStream{});
}
// What is there as long as somebody has this array.
inline std::weak_ptr<const void> lifetime_of(const mx::array& of) {
  return of.*member(opened::Descriptor{});
}
// How many arrays are the same one.
inline long uses(const mx::array& in) {
  return (in.*member(opened::Descriptor{})).use_count();
}

}  // namespace mlx_cuda
