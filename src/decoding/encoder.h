// What MLX's classes keep to themselves and a recording needs: the graph that an encoder is building, and the stream of a
// primitive. An explicit instantiation may name private members; this header is the only place that does (docs/decoding.md).
#pragma once

#include <cuda.h>
#include <mlx/backend/cuda/device.h>
#include <mlx/primitives.h>

#include <memory>
#include <type_traits>
#include <vector>

namespace mlx_cuda {

namespace mx = mlx::core;

namespace opened {

template <auto Member, int Which>
struct Open {
  friend constexpr auto member(std::integral_constant<int, Which>) {
    return Member;
  }
};

constexpr auto member(std::integral_constant<int, 0>);
constexpr auto member(std::integral_constant<int, 1>);
constexpr auto member(std::integral_constant<int, 2>);
constexpr auto member(std::integral_constant<int, 3>);
constexpr auto member(std::integral_constant<int, 4>);
constexpr auto member(std::integral_constant<int, 5>);
template struct Open<&mx::cu::CommandEncoder::graph_, 0>;
template struct Open<&mx::cu::CommandEncoder::from_nodes_, 1>;
template struct Open<&mx::cu::CommandEncoder::to_nodes_, 2>;
template struct Open<&mx::cu::CommandEncoder::temporaries_, 3>;
template struct Open<&mx::Primitive::stream_, 4>;
template struct Open<&mx::array::array_desc_, 5>;

template <int Which, typename T>
auto& get(T& of) {
  return of.*member(std::integral_constant<int, Which>{});
}

}  // namespace opened

// The nodes that were added since the last commit, whose edges are added by the commit only.
inline CUgraph graph_of(mx::cu::CommandEncoder& encoder) {
  return static_cast<cudaGraph_t>(opened::get<0>(encoder));
}
inline const std::vector<cudaGraphNode_t>& edges_from(mx::cu::CommandEncoder& encoder) {
  return opened::get<1>(encoder);
}
inline const std::vector<cudaGraphNode_t>& edges_to(mx::cu::CommandEncoder& encoder) {
  return opened::get<2>(encoder);
}
// What these nodes use besides the arrays of MLX's graph.
inline const std::vector<std::shared_ptr<mx::array::Data>>& temporaries_of(mx::cu::CommandEncoder& encoder) {
  return opened::get<3>(encoder);
}
inline mx::Stream& stream_of(mx::Primitive& primitive) {
  return opened::get<4>(primitive);
}
// How many arrays are the same one.
inline long uses(const mx::array& in) {
  return opened::get<5>(in).use_count();
}

}  // namespace mlx_cuda
