#include "libraries/cudnn.h"

#include "runtime/capture.h"
#include "runtime/lru.h"
#include "runtime/status.h"

#include <mlx/backend/cuda/utils.h>

#include <cudnn_frontend.h>

#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

namespace mlx_cuda {

namespace {

namespace fe = cudnn_frontend;

enum Tensor : std::int64_t { q_tensor = 1, k_tensor, v_tensor, out_tensor };

struct HandleDestroyer {
  void operator()(cudnnHandle_t handle) const {
    cudnnDestroy(handle);
  }
};

// An attention graph: first only checked, then with a plan. `refusal` is cuDNN's word when it does not take the problem.
struct Plan {
  std::unique_ptr<fe::graph::Graph> graph;
  std::string refusal;
  bool built = false;
  std::int64_t workspace = 0;
};

struct Context {
  std::unique_ptr<std::remove_pointer_t<cudnnHandle_t>, HandleDestroyer> handle;
  LruCache<Plan> plans{256};
};

// cuDNN handles and plans belong to one thread and one device.
Context& context(int device) {
  static thread_local std::map<int, Context> contexts;
  Context& context = contexts[device];
  if (!context.handle) {
    cudnnHandle_t handle = nullptr;
    MLX_CUDA_CHECK(cudnnCreate(&handle));
    context.handle.reset(handle);
  }
  return context;
}

std::shared_ptr<fe::graph::Tensor_attributes> tensor(
    const char* name, Tensor uid, const std::vector<std::int64_t>& dims, const AttentionProblem::Strides& strides) {
  auto attributes = fe::graph::Tensor_attributes().set_name(name).set_uid(uid).set_dim(dims).set_stride(
      {strides.batch, strides.head, strides.row, 1});
  return std::make_shared<fe::graph::Tensor_attributes>(attributes);
}

// Describes the problem to cuDNN and asks whether an engine takes it.
Plan check_problem(const AttentionProblem& problem, cudnnHandle_t handle) {
  Plan plan;
  plan.graph = std::make_unique<fe::graph::Graph>();
  fe::graph::Graph& graph = *plan.graph;
  graph.set_io_data_type(problem.dtype == mx::float16 ? fe::DataType_t::HALF : fe::DataType_t::BFLOAT16)
      .set_intermediate_data_type(fe::DataType_t::FLOAT)
      .set_compute_data_type(fe::DataType_t::FLOAT);

  const auto& p = problem;
  auto add = [&](const char* name, Tensor uid, std::int64_t heads, std::int64_t length, const AttentionProblem::Strides& strides) {
    return graph.tensor(*tensor(name, uid, {p.batch, heads, length, p.head_dim}, strides));
  };
  auto q = add("q", q_tensor, p.heads, p.q_length, p.q);
  auto k = add("k", k_tensor, p.kv_heads, p.kv_length, p.k);
  auto v = add("v", v_tensor, p.kv_heads, p.kv_length, p.v);
  auto options = fe::graph::SDPA_attributes().set_name("attention").set_attn_scale(p.scale).set_generate_stats(false);
  if (p.causal) {
    options.set_diagonal_alignment(fe::DiagonalAlignment_t::BOTTOM_RIGHT).set_diagonal_band_right_bound(0);
    if (p.window_left >= 0) {
      options.set_diagonal_band_left_bound(p.window_left + 1);  // the query's own place counts
    }
  }
  auto out = graph.sdpa(q, k, v, options)[0];
  out->set_output(true)
      .set_uid(out_tensor)
      .set_dim({p.batch, p.heads, p.q_length, p.head_dim})
      .set_stride({p.out.batch, p.out.head, p.out.row, 1});

  auto accepted = [&](fe::error_t error) {
    if (error.is_bad()) {
      plan.refusal = error.get_message().empty() ? "cuDNN gave no reason" : error.get_message();
      plan.graph.reset();
    }
    return !error.is_bad();
  };
  accepted(graph.validate()) && accepted(graph.build_operation_graph(handle)) &&
      accepted(graph.create_execution_plans({fe::HeurMode_t::A})) && accepted(graph.check_support());
  return plan;
}

// Builds the plan of a problem that was accepted; the engine that the heuristic prefers may still fail to compile.
void build(Plan& plan) {
  fe::error_t error = plan.graph->build_plans();
  if (!error.is_bad()) {
    error = plan.graph->get_workspace_size(plan.workspace);
  }
  plan.built = !error.is_bad();
  if (error.is_bad()) {
    plan.refusal = "building the plan failed: " + error.get_message();
    plan.graph.reset();
  }
}

Plan& find_plan(const AttentionProblem& p, Context& cudnn) {
  Key key(p.dtype.val(), p.batch, p.heads, p.kv_heads, p.q_length, p.kv_length, p.head_dim, p.scale, p.causal, p.window_left);
  for (const auto* strides : {&p.q, &p.k, &p.v, &p.out}) {
    key.add(strides->batch);
    key.add(strides->head);
    key.add(strides->row);
  }
  return cudnn.plans.get(key, [&] { return check_problem(p, cudnn.handle.get()); });
}

}  // namespace

std::string why_unsupported(const AttentionProblem& problem, mx::cu::Device& device) {
  return find_plan(problem, context(device.cuda_device())).refusal;
}

bool encode_attention(
    const AttentionProblem& problem,
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    mx::array& out,
    mx::cu::CommandEncoder& encoder,
    const mx::Stream& stream) {
  Context& cudnn = context(encoder.device().cuda_device());
  Plan& plan = find_plan(problem, cudnn);
  if (plan.refusal.empty() && !plan.built) {
    build(plan);
  }
  if (!plan.refusal.empty()) {
    return false;
  }
  // Allocation may add a node of its own to the graph, so it comes before the inputs and outputs of ours are named.
  void* scratch = workspace(static_cast<std::size_t>(plan.workspace), encoder, stream);
  encoder.set_input_array(q);
  encoder.set_input_array(k);
  encoder.set_input_array(v);
  encoder.set_output_array(out);
  std::unordered_map<std::int64_t, void*> pointers{
      {q_tensor, const_cast<void*>(static_cast<const void*>(mx::gpu_ptr<void>(q)))},
      {k_tensor, const_cast<void*>(static_cast<const void*>(mx::gpu_ptr<void>(k)))},
      {v_tensor, const_cast<void*>(static_cast<const void*>(mx::gpu_ptr<void>(v)))},
      {out_tensor, mx::gpu_ptr<void>(out)},
  };
  MLX_CUDA_CHECK(cudnnSetStream(cudnn.handle.get(), encoder.stream()));
  Capture capture(encoder);
  fe::error_t error = plan.graph->execute(cudnn.handle.get(), pointers, scratch);
  if (error.is_bad()) {
    throw std::runtime_error("[attention] cuDNN failed: " + error.get_message());
  }
  capture.submit();
  return true;
}

}  // namespace mlx_cuda
