#include "attention/cudnn/plans.h"

#include "runtime/lru.h"
#include "runtime/status.h"

#include <cudnn_frontend.h>

#include <atomic>
#include <initializer_list>
#include <map>
#include <stdexcept>
#include <type_traits>
#include <vector>

namespace mlx_cuda {

namespace {

namespace fe = cudnn_frontend;

using Strides = AttentionProblem::Strides;
using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

std::atomic<int> built_plans = 0;

struct HandleDestroyer {
  void operator()(cudnnHandle_t handle) const {
    cudnnDestroy(handle);
  }
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

// Names the tensors of one problem and gives them their shapes.
class Describer {
 public:
  explicit Describer(const AttentionProblem& problem) : p_(problem), graph_(std::make_unique<fe::graph::Graph>()) {
    graph_->set_io_data_type(p_.dtype == mx::float16 ? fe::DataType_t::HALF : fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
  }

  std::unique_ptr<fe::graph::Graph> forward() {
    auto options = fe::graph::SDPA_attributes().set_name("attention").set_attn_scale(p_.scale).set_generate_stats(p_.lse);
    mask(options);
    if (p_.sinks) {
      auto sinks = like(Operand::sinks, "sinks", {1, p_.heads, 1, 1}, {p_.heads, 1, 1, 1});
      options.set_sink_token(graph_->tensor(sinks.set_data_type(fe::DataType_t::FLOAT)));
    }
    const auto [out, lse] = graph_->sdpa(queries(Operand::q, "q", p_.q), keys(p_.k), values(p_.v), options);
    give(out, Operand::out, {p_.batch, p_.heads, p_.q_length, p_.v_head_dim}, p_.out);
    if (p_.lse) {
      lse->set_output(true)
          .set_uid(static_cast<std::int64_t>(Operand::lse))
          .set_data_type(fe::DataType_t::FLOAT)
          .set_dim({p_.batch, p_.heads, p_.q_length, 1})
          .set_stride(lse_strides());
    }
    return std::move(graph_);
  }

  std::unique_ptr<fe::graph::Graph> backward(const AttentionBackwardProblem& problem) {
    auto options = fe::graph::SDPA_backward_attributes()
                       .set_name("attention")
                       .set_attn_scale(p_.scale)
                       .set_deterministic_algorithm(problem.deterministic);
    mask(options);
    auto lse = like(Operand::lse, "lse", {p_.batch, p_.heads, p_.q_length, 1}, lse_strides());
    auto rows = [&](Operand operand, const char* name, const Strides& strides) {
      return graph_->tensor(like(operand, name, {p_.batch, p_.heads, p_.q_length, p_.v_head_dim}, four(strides)));
    };
    const auto [d_q, d_k, d_v] = graph_->sdpa_backward(
        queries(Operand::q, "q", p_.q), keys(p_.k), values(p_.v), rows(Operand::out, "out", p_.out),
        rows(Operand::d_out, "d_out", problem.d_out), graph_->tensor(lse.set_data_type(fe::DataType_t::FLOAT)), options);
    give(d_q, Operand::d_q, {p_.batch, p_.heads, p_.q_length, p_.head_dim}, problem.d_q);
    give(d_k, Operand::d_k, {p_.batch, p_.kv_heads, p_.kv_length, p_.head_dim}, problem.d_k);
    give(d_v, Operand::d_v, {p_.batch, p_.kv_heads, p_.kv_length, p_.v_head_dim}, problem.d_v);
    return std::move(graph_);
  }

 private:
  using Numbers = std::vector<std::int64_t>;

  static Numbers four(const Strides& strides) {
    return {strides.batch, strides.head, strides.row, 1};
  }

  static fe::graph::Tensor_attributes like(Operand operand, const char* name, const Numbers& shape, const Numbers& strides) {
    return fe::graph::Tensor_attributes()
        .set_name(name)
        .set_uid(static_cast<std::int64_t>(operand))
        .set_dim(shape)
        .set_stride(strides);
  }

  static void give(const Tensor& tensor, Operand operand, const Numbers& shape, const Strides& strides) {
    tensor->set_output(true).set_uid(static_cast<std::int64_t>(operand)).set_dim(shape).set_stride(four(strides));
  }

  Tensor queries(Operand operand, const char* name, const Strides& strides) {
    return graph_->tensor(like(operand, name, {p_.batch, p_.heads, p_.q_length, p_.head_dim}, four(strides)));
  }

  Tensor keys(const Strides& strides) {
    return graph_->tensor(like(Operand::k, "k", {p_.batch, p_.kv_heads, p_.kv_length, p_.head_dim}, four(strides)));
  }

  Tensor values(const Strides& strides) {
    return graph_->tensor(like(Operand::v, "v", {p_.batch, p_.kv_heads, p_.kv_length, p_.v_head_dim}, four(strides)));
  }

  Numbers lse_strides() const {
    return {p_.heads * p_.q_length, p_.q_length, 1, 1};
  }

  // Where there are as many keys as queries both ways of stating a causal mask are the same, and cuDNN's speed differs: its
  // backward, and its forward with a window, skip what is hidden only from the upper left; its forward for head_dims over 64 is 3 %
  // faster from the lower right when many calls run one after another.
  template <typename Options>
  bool from_upper_left() const {
    const bool forward = std::is_same_v<Options, fe::graph::SDPA_attributes>;
    const bool faster_from_lower_right = forward && p_.window_left < 0 && p_.head_dim > 64 && p_.head_dim <= 128;
    return p_.q_length == p_.kv_length && !faster_from_lower_right;
  }

  template <typename Options>
  void mask(Options& options) const {
    if (p_.causal) {
      options
          .set_diagonal_alignment(
              from_upper_left<Options>() ? fe::DiagonalAlignment_t::TOP_LEFT : fe::DiagonalAlignment_t::BOTTOM_RIGHT)
          .set_diagonal_band_right_bound(0);
      if (p_.window_left >= 0) {
        options.set_diagonal_band_left_bound(p_.window_left + 1);  // the query's own place counts
      }
    }
  }

  const AttentionProblem& p_;
  std::unique_ptr<fe::graph::Graph> graph_;
};

void add(Key& key, std::initializer_list<const Strides*> all) {
  for (const Strides* strides : all) {
    key.add(strides->batch);
    key.add(strides->head);
    key.add(strides->row);
  }
}

Key key_of(const AttentionProblem& p) {
  Key key(
      p.dtype.val(), p.batch, p.heads, p.kv_heads, p.q_length, p.kv_length, p.head_dim, p.v_head_dim, p.scale, p.causal,
      p.window_left, p.sinks, p.lse);
  add(key, {&p.q, &p.k, &p.v, &p.out});
  return key;
}

}  // namespace

Plan::Plan(std::unique_ptr<fe::graph::Graph> graph, cudnnHandle_t handle) : graph_(std::move(graph)), handle_(handle) {
  auto accepted = [&](fe::error_t error) {
    if (error.is_bad()) {
      refusal_ = error.get_message().empty() ? "cuDNN gave no reason" : error.get_message();
      graph_.reset();
    }
    return !error.is_bad();
  };
  accepted(graph_->validate()) && accepted(graph_->build_operation_graph(handle_)) &&
      accepted(graph_->create_execution_plans({fe::HeurMode_t::A})) && accepted(graph_->check_support());
}

Plan::Plan(Plan&&) noexcept = default;
Plan::~Plan() = default;

bool Plan::ready() {
  if (built_ || !refusal_.empty()) {
    return built_;
  }
  fe::error_t error = graph_->build_plans();
  if (!error.is_bad()) {
    error = graph_->get_workspace_size(workspace_);
  }
  built_ = !error.is_bad();
  if (built_) {
    ++built_plans;
  } else {
    refusal_ = "building the plan failed: " + error.get_message();
    graph_.reset();
  }
  return built_;
}

void Plan::use(CUstream stream) const {
  MLX_CUDA_CHECK(cudnnSetStream(handle_, stream));
}

void Plan::run(std::unordered_map<std::int64_t, void*>& pointers, void* scratch) const {
  fe::error_t error = graph_->execute(handle_, pointers, scratch);
  if (error.is_bad()) {
    throw std::runtime_error("[attention] cuDNN failed: " + error.get_message());
  }
}

Plan& find_plan(const AttentionProblem& problem, int device) {
  Context& cudnn = context(device);
  const cudnnHandle_t handle = cudnn.handle.get();
  return cudnn.plans.get(key_of(problem), [&] { return Plan(Describer(problem).forward(), handle); });
}

Plan& find_plan(const AttentionBackwardProblem& problem, int device) {
  Context& cudnn = context(device);
  const cudnnHandle_t handle = cudnn.handle.get();
  Key key = key_of(problem.forward);
  key.add(problem.deterministic);
  add(key, {&problem.d_out, &problem.d_q, &problem.d_k, &problem.d_v});
  return cudnn.plans.get(key, [&] { return Plan(Describer(problem.forward).backward(problem), handle); });
}

int plans_built() {
  return built_plans;
}

}  // namespace mlx_cuda
