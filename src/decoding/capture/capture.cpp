// How a step is captured: its primitives are encoded one after another, and the nodes taken from MLX's encoder.
#include "all_sum/all_sum.h"
#include "decoding/capture/edges.h"
#include "decoding/capture/step.h"
#include "decoding/fusion/fusion.h"
#include "decoding/graph/capture_error.h"
#include "decoding/graph/plan.h"
#include "runtime/faults.h"
#include "runtime/memory.h"
#include "runtime/mlx_internals.h"
#include "runtime/status.h"

#include <mlx/transforms.h>

#include <exception>

namespace mlx_cuda {

void Step::record(const mx::array& result, const mx::array& tokens, const std::vector<Place>& places) {
  Plan plan = capturing([&] { return Plan(result); });
  // The caller's arrays, such as weights, are computed and launched before the capture: their errors are MLX's own.
  mx::eval(plan.constants());
  mx::eval(tokens);
  auto& encoder = mx::cu::get_command_encoder(stream_);
  encoder.device().make_current();
  encoder.commit();
  capturing([&] { capture(plan, tokens, places); });
  result_.push_back(view(result, result.shape(), result.strides(), result.flags().row_contiguous));
}

// MLX never launches the graph: it would keep another executable of its thousand nodes, and update that for any graph with an
// equal key, which ignores a cluster kernel's clusters (decoding/token/token_sm90.cu).
void Step::capture(Plan& plan, const mx::array& tokens, const std::vector<Place>& places) {
  fuse(plan, stream_);
  for (const Item& item : plan.items()) {
    if (item.name == kAllSum) {
      peers_.insert(peers_of_sum(item.outputs[0].primitive()));
    }
  }
  auto& encoder = mx::cu::get_command_encoder(stream_);
  try {
    leave_alone(true);
    begin(tokens, places, encoder.stream());
    capturing_ = true;
    encode(plan);
    capturing_ = false;
    make_executable(take_graph(encoder));
    if (executable_) {
      MLX_CUDA_CHECK(cuGraphLaunch(executable_, encoder.stream()));
    }
    leave_alone(false);
    encoder.synchronize();
  } catch (...) {
    capturing_ = false;
    EncodedGraph dropped;  // its memory is freed when the stream's work that uses it has finished
    try {
      dropped = take_graph(encoder);
    } catch (const std::exception&) {  // MLX launches it, on memory of the step's own
    }
    destroy();
    leave_alone(false);
    encoder.synchronize();
    throw;
  }
}

void Step::encode(const Plan& plan) {
  for (const auto& arrays : {plan.constants(), written_}) {  // where they are before their addresses are taken
    for (const mx::array& array : arrays) {
      hold(array);
      if (const auto* buffer = buffer_of(array)) {
        captured_at_.emplace_back(buffer, buffer->data);
      }
    }
  }
  auto& encoder = mx::cu::get_command_encoder(stream_);
  const OwnTemporaries own;
  const CommitWatch watch(encoder);
  for (const Item* item : plan.order()) {
    item->run(stream_);
    if (fault("commit")) {
      encoder.commit();
    }
    if (watch.committed()) {  // what came before it has run already, and is not in the graph
      throw CaptureError("[decode_step] " + item->name + " launches kernels while it is captured, so the step cannot be captured.");
    }
    ++primitives_[item->name];
    for (const mx::array& output : item->outputs) {
      output.set_status(mx::array::Status::evaluated);
      hold(output);
      made_.add(output);
    }
  }
}

void Step::make_executable(EncodedGraph encoded) {
  memory_.insert(encoded.temporaries.begin(), encoded.temporaries.end());
  nodes_ = encoded.nodes;
  if (nodes_ > 0) {
    MLX_CUDA_CHECK(cuCtxGetCurrent(&context_));
    make_cooperative(encoded.graph.get());
    add_edges(encoded.graph.get(), encoded.from, encoded.to);
    MLX_CUDA_CHECK(cuGraphInstantiate(&executable_, encoded.graph.get(), 0));
  }
}

}  // namespace mlx_cuda
