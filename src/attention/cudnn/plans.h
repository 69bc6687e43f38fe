// Attention as graphs of cuDNN, and their plans. The only place that knows cudnn_frontend.
#pragma once

#include "runtime/arrays.h"

#include <cuda.h>
#include <cudnn.h>
#include <mlx/dtype.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>

namespace cudnn_frontend::graph {
class Graph;
}

namespace mlx_cuda {

// softmax(scale * q k^T) v. Lengths in elements; strides of the batch, head and sequence dimensions, head_dim being adjacent.
struct SdpaProblem {
  mx::Dtype dtype;
  std::int64_t batch, heads, kv_heads, q_length, kv_length, head_dim, v_head_dim;
  float scale;
  bool causal;      // lower right: the last query sees every key
  int window_left;  // keys before its own position that a query sees, with causal; negative: all
  bool sinks;       // a score of each head, float32, that has no value
  bool stats;       // also returns the log-sum-exp

  struct Strides {
    std::int64_t batch, head, row;
  };
  Strides q, k, v, out;
};

// The gradients of q, k and v. Those of the forward's sinks are no part of it: its stats say all that is to be known of them.
struct SdpaBackwardProblem {
  SdpaProblem forward;
  bool deterministic;
  bool lengths_given;  // as a padding mask of all queries and keys
  SdpaProblem::Strides d_out, d_q, d_k, d_v;
};

// Ids of the tensors in the graphs. stats, the log-sum-exp, is float32 [B, H, Tq], sinks float32 [H], both contiguous. The
// lengths are int32 [B].
enum class Uid : std::int64_t { q = 1, k, v, out, stats, sinks, d_out, d_q, d_k, d_v, q_lengths, kv_lengths };

// One problem, at first only described to cuDNN and checked; its plan is built on first use.
class ExecutionPlan {
 public:
  ExecutionPlan(std::unique_ptr<cudnn_frontend::graph::Graph> graph, cudnnHandle_t handle);
  ExecutionPlan(ExecutionPlan&&) noexcept;
  ~ExecutionPlan();

  // cuDNN's word when it does not take the problem, else empty.
  const std::string& refusal() const {
    return refusal_;
  }

  // Whether there is a plan to run. The first call builds it, which takes tens of milliseconds; the engine that cuDNN prefers may
  // still fail to compile then.
  bool ready();

  std::size_t workspace() const {
    return static_cast<std::size_t>(workspace_);
  }

  // Says where the work goes. Not while a graph is captured from the stream: that is no part of the work.
  void set_stream(CUstream stream) const;

  // Puts the work there, once ready.
  void execute(std::unordered_map<std::int64_t, void*>& pointers, void* scratch);

 private:
  std::unique_ptr<cudnn_frontend::graph::Graph> graph_;
  cudnnHandle_t handle_;
  std::string refusal_;
  bool built_ = false;
  std::int64_t workspace_ = 0;
};

// The plan of a problem on a device, remembered. The reference holds until the next call in this thread.
ExecutionPlan& find_plan(const SdpaProblem& problem, int device);
ExecutionPlan& find_plan(const SdpaBackwardProblem& problem, int device);

// How many plans this process has built.
int plans_built();

}  // namespace mlx_cuda
