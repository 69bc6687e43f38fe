#include "decoding/walk.h"

#include "decoding/encoder.h"
#include "runtime/status.h"

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace mlx_cuda {

namespace {

bool computed(const mx::array& in) {
  return !in.has_primitive() || in.status() != mx::array::Status::unscheduled;
}

// Sets the stream of a primitive for a while: those of a compiled function keep the stream of its first call.
class OnStream {
 public:
  OnStream(mx::Primitive& primitive, const mx::Stream& stream) : stream_(stream_of(primitive)), before_(stream_) {
    stream_ = stream;
  }
  OnStream(const OnStream&) = delete;
  OnStream& operator=(const OnStream&) = delete;
  ~OnStream() {
    stream_ = before_;
  }

 private:
  mx::Stream& stream_;
  const mx::Stream before_;
};

}  // namespace

Walk::Walk(const mx::array& result) {
  struct Visit {
    mx::array array;
    bool entered;
  };
  std::unordered_map<std::uintptr_t, bool> depends;  // of all that was seen, by its id
  std::unordered_set<std::uintptr_t> kept;
  std::vector<Visit> stack{{result, false}};
  while (!stack.empty()) {
    const mx::array array = stack.back().array;
    if (depends.contains(array.id())) {
      stack.pop_back();
      continue;
    }
    if (computed(array)) {
      depends[array.id()] = false;
      continue;
    }
    if (!stack.back().entered) {
      stack.back().entered = true;
      for (const mx::array& in : array.inputs()) {
        stack.push_back({in, false});
      }
      continue;
    }
    const std::string_view name = array.primitive().name();
    const auto& inputs = array.inputs();
    const bool needed =
        name == kPlaced || std::any_of(inputs.begin(), inputs.end(), [&](const mx::array& in) { return depends.at(in.id()); });
    for (const mx::array& out : array.outputs()) {
      depends[out.id()] = needed;
    }
    if (!needed) {
      continue;
    }
    if (array.primitive().stream().device.type != mx::Device::gpu) {
      throw std::invalid_argument("[decode_step] " + std::string(name) + " runs on the CPU.");
    }
    if (name == "RandomBits") {
      throw std::invalid_argument("[decode_step] The model draws random numbers.");
    }
    order_.push_back(array);
    for (const mx::array& in : inputs) {
      if (!depends.at(in.id()) && kept.insert(in.id()).second) {
        constants_.push_back(in);
      }
    }
    const auto outputs = array.outputs();
    arrays_.insert(arrays_.end(), outputs.begin(), outputs.end());
  }
  if (order_.empty()) {
    throw std::invalid_argument("[decode_step] The result does not depend on the tokens.");
  }
  arrays_.insert(arrays_.end(), constants_.begin(), constants_.end());
}

void Walk::encode(const mx::Stream& stream) {
  for (const mx::array& array : order_) {
    const OnStream there(array.primitive(), stream);
    std::vector<mx::array> outputs = array.outputs();
    array.primitive().eval_gpu(array.inputs(), outputs);
    for (const mx::array& output : outputs) {
      output.set_status(mx::array::Status::evaluated);
    }
  }
}

void add_edges(CUgraph graph, const std::vector<CUgraphNode>& from, const std::vector<CUgraphNode>& to) {
  if (from.empty()) {
    return;
  }
#if CUDA_VERSION >= 13000
  MLX_CUDA_CHECK(cuGraphAddDependencies(graph, from.data(), to.data(), nullptr, from.size()));
#else
  MLX_CUDA_CHECK(cuGraphAddDependencies(graph, from.data(), to.data(), from.size()));
#endif
}

}  // namespace mlx_cuda
