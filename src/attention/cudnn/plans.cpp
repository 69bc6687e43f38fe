#include "attention/cudnn/plans.h"

#include "runtime/faults.h"
#include "runtime/lru.h"
#include "runtime/status.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <initializer_list>
#include <map>
#include <stdexcept>
#include <type_traits>
#include <vector>

// cudnn_frontend asks for a structure whose layout CUDA 13 changed, and reads its `major` alone
// (tests/ci/test_shared_host_code.py): given that by the driver, one compilation serves both majors.
template <typename Properties>
inline cudaError_t major_alone(Properties* properties, int device) {
  const CUresult status = cuDeviceGetAttribute(&properties->major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device);
  return status == CUDA_SUCCESS ? cudaSuccess : cudaErrorUnknown;
}
#undef cudaGetDeviceProperties
#define cudaGetDeviceProperties ::major_alone
#include <cudnn_frontend.h>

namespace mlx_cuda {

namespace {

namespace fe = cudnn_frontend;

using Strides = SdpaProblem::Strides;
using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

std::atomic<int> built_plans = 0;

struct HandleDestroyer {
  void operator()(cudnnHandle_t handle) const {
    cudnnDestroy(handle);
  }
};

struct Context {
  std::unique_ptr<std::remove_pointer_t<cudnnHandle_t>, HandleDestroyer> handle;
  LruCache<ExecutionPlan> plans{256};
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
class SdpaGraph {
 public:
  explicit SdpaGraph(const SdpaProblem& problem) : p_(problem), graph_(std::make_unique<fe::graph::Graph>()) {
    graph_->set_io_data_type(p_.dtype == mx::float16 ? fe::DataType_t::HALF : fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
  }

  std::unique_ptr<fe::graph::Graph> forward() {
    auto options = fe::graph::SDPA_attributes().set_name("attention").set_attn_scale(p_.scale).set_generate_stats(p_.stats);
    mask(options);
    if (p_.sinks) {
      auto sinks = like(Uid::sinks, "sinks", {1, p_.heads, 1, 1}, {p_.heads, 1, 1, 1});
      options.set_sink_token(graph_->tensor(sinks.set_data_type(fe::DataType_t::FLOAT)));
    }
    const auto [out, stats] = graph_->sdpa(queries(Uid::q, "q", p_.q), keys(p_.k), values(p_.v), options);
    give(out, Uid::out, {p_.batch, p_.heads, p_.q_length, p_.v_head_dim}, p_.out);
    if (p_.stats) {
      stats->set_output(true)
          .set_uid(static_cast<std::int64_t>(Uid::stats))
          .set_data_type(fe::DataType_t::FLOAT)
          .set_dim({p_.batch, p_.heads, p_.q_length, 1})
          .set_stride(stats_strides());
    }
    return std::move(graph_);
  }

  std::unique_ptr<fe::graph::Graph> backward(const SdpaBackwardProblem& problem) {
    auto options = fe::graph::SDPA_backward_attributes()
                       .set_name("attention")
                       .set_attn_scale(p_.scale)
                       .set_deterministic_algorithm(problem.deterministic);
    mask(options);
    if (problem.lengths_given) {
      auto lengths = [&](Uid uid, const char* name) {
        return graph_->tensor(like(uid, name, {p_.batch, 1, 1, 1}, {1, 1, 1, 1}).set_data_type(fe::DataType_t::INT32));
      };
      options.set_padding_mask(true)
          .set_seq_len_q(lengths(Uid::q_lengths, "q_lengths"))
          .set_seq_len_kv(lengths(Uid::kv_lengths, "kv_lengths"));
    }
    auto stats = like(Uid::stats, "stats", {p_.batch, p_.heads, p_.q_length, 1}, stats_strides());
    auto rows = [&](Uid uid, const char* name, const Strides& strides) {
      return graph_->tensor(like(uid, name, {p_.batch, p_.heads, p_.q_length, p_.v_head_dim}, four(strides)));
    };
    const auto [d_q, d_k, d_v] = graph_->sdpa_backward(
        queries(Uid::q, "q", p_.q), keys(p_.k), values(p_.v), rows(Uid::out, "out", p_.out),
        rows(Uid::d_out, "d_out", problem.d_out), graph_->tensor(stats.set_data_type(fe::DataType_t::FLOAT)), options);
    give(d_q, Uid::d_q, {p_.batch, p_.heads, p_.q_length, p_.head_dim}, problem.d_q);
    give(d_k, Uid::d_k, {p_.batch, p_.kv_heads, p_.kv_length, p_.head_dim}, problem.d_k);
    give(d_v, Uid::d_v, {p_.batch, p_.kv_heads, p_.kv_length, p_.v_head_dim}, problem.d_v);
    return std::move(graph_);
  }

 private:
  using Numbers = std::vector<std::int64_t>;

  static Numbers four(const Strides& strides) {
    return {strides.batch, strides.head, strides.row, 1};
  }

  static fe::graph::Tensor_attributes like(Uid uid, const char* name, const Numbers& shape, const Numbers& strides) {
    return fe::graph::Tensor_attributes().set_name(name).set_uid(static_cast<std::int64_t>(uid)).set_dim(shape).set_stride(strides);
  }

  static void give(const Tensor& tensor, Uid uid, const Numbers& shape, const Strides& strides) {
    tensor->set_output(true).set_uid(static_cast<std::int64_t>(uid)).set_dim(shape).set_stride(four(strides));
  }

  Tensor queries(Uid uid, const char* name, const Strides& strides) {
    return graph_->tensor(like(uid, name, {p_.batch, p_.heads, p_.q_length, p_.head_dim}, four(strides)));
  }

  Tensor keys(const Strides& strides) {
    return graph_->tensor(like(Uid::k, "k", {p_.batch, p_.kv_heads, p_.kv_length, p_.head_dim}, four(strides)));
  }

  Tensor values(const Strides& strides) {
    return graph_->tensor(like(Uid::v, "v", {p_.batch, p_.kv_heads, p_.kv_length, p_.v_head_dim}, four(strides)));
  }

  Numbers stats_strides() const {
    return {p_.heads * p_.q_length, p_.q_length, 1, 1};
  }

  // With as many keys as queries both alignments of a causal mask are the same, and cuDNN's speed differs: its backward pass, and
  // its forward pass with a window, skip masked tiles only from the upper left; its forward pass for head_dims over 64 is 3 %
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
        options.set_diagonal_band_left_bound(p_.window_left + 1);  // the query's own position counts
      }
    }
  }

  const SdpaProblem& p_;
  std::unique_ptr<fe::graph::Graph> graph_;
};

void add(Key& key, std::initializer_list<const Strides*> all) {
  for (const Strides* strides : all) {
    key.add(strides->batch);
    key.add(strides->head);
    key.add(strides->row);
  }
}

Key key_of(const SdpaProblem& p) {
  Key key(
      p.dtype.val(), p.batch, p.heads, p.kv_heads, p.q_length, p.kv_length, p.head_dim, p.v_head_dim, p.scale, p.causal,
      p.window_left, p.sinks, p.stats);
  add(key, {&p.q, &p.k, &p.v, &p.out});
  return key;
}

// The GPU is out of memory at the moment, which is no property of the plan. cuDNN's frontend drops the reason if no plan was
// built.
bool is_full(fe::error_t error) {
  constexpr std::size_t least = std::size_t{256} << 20;
  std::size_t free = least;
  std::size_t total = 0;
  return error.is_bad() &&
         (error.get_message().find("ALLOC") != std::string::npos || (succeeded(cuMemGetInfo(&free, &total)) && free < least));
}

}  // namespace

ExecutionPlan::ExecutionPlan(std::unique_ptr<fe::graph::Graph> graph, cudnnHandle_t handle)
    : graph_(std::move(graph)), handle_(handle) {
  auto accepted = [&](fe::error_t error) {
    if (is_full(error)) {
      throw std::runtime_error("[attention] There is no memory for a cuDNN plan: " + error.get_message());
    }
    if (error.is_bad()) {
      refusal_ = error.get_message().empty() ? "cuDNN gave no reason" : error.get_message();
      graph_.reset();
    }
    return !error.is_bad();
  };
  accepted(graph_->validate()) && accepted(graph_->build_operation_graph(handle_)) &&
      accepted(graph_->create_execution_plans({fe::HeurMode_t::A})) && accepted(graph_->check_support());
}

ExecutionPlan::ExecutionPlan(ExecutionPlan&&) noexcept = default;
ExecutionPlan::~ExecutionPlan() = default;

bool ExecutionPlan::ready() {
  if (built_ || !refusal_.empty()) {
    return built_;
  }
  if (fault("cudnn")) {
    refusal_ = "a test has it fail";
    graph_.reset();
    return false;
  }
  fe::error_t error = fault("cudnn full") ? fe::error_t{fe::error_code_t::CUDNN_BACKEND_API_FAILED, "CUDNN_STATUS_ALLOC_FAILED"}
                                          : graph_->build_plans();
  if (is_full(error)) {
    return false;
  }
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

void ExecutionPlan::set_stream(CUstream stream) const {
  MLX_CUDA_CHECK(cudnnSetStream(handle_, stream));
}

void ExecutionPlan::execute(std::unordered_map<std::int64_t, void*>& pointers, void* scratch) {
  fe::error_t error = graph_->execute(handle_, pointers, scratch);
  const std::string text = "[attention] cuDNN failed: " + error.get_message();
  if (fault("cudnn") || (error.is_bad() && text.find("NOT_SUPPORTED") != text.npos)) {
    refusal_ = text;  // from now on
    built_ = false;
    graph_.reset();
    throw Unavailable(text, true);
  }
  if (error.is_bad()) {
    throw std::runtime_error(text);
  }
}

ExecutionPlan& find_plan(const SdpaProblem& problem, int device) {
  auto& [handle, plans] = context(device);
  return plans.get(key_of(problem), [&] { return ExecutionPlan(SdpaGraph(problem).forward(), handle.get()); });
}

ExecutionPlan& find_plan(const SdpaBackwardProblem& problem, int device) {
  auto& [handle, plans] = context(device);
  Key key = key_of(problem.forward);
  key.add(problem.deterministic);
  key.add(problem.lengths_given);
  add(key, {&problem.d_out, &problem.d_q, &problem.d_k, &problem.d_v});
  return plans.get(key, [&] { return ExecutionPlan(SdpaGraph(problem.forward).backward(problem), handle.get()); });
}

int plans_built() {
  return built_plans;
}

}  // namespace mlx_cuda
