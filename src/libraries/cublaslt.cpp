#include "libraries/cublaslt.h"

#include "runtime/capture.h"
#include "runtime/lru.h"
#include "runtime/status.h"

#include <mlx/backend/cuda/utils.h>

#include <cstdlib>
#include <map>
#include <memory>
#include <string_view>
#include <type_traits>

namespace mlx_cuda {

namespace {

template <auto Destroy>
struct Destroyer {
  template <typename T>
  void operator()(T* handle) const {
    Destroy(handle);
  }
};
template <typename Handle, auto Destroy>
using Owned = std::unique_ptr<std::remove_pointer_t<Handle>, Destroyer<Destroy>>;

using LtHandle = Owned<cublasLtHandle_t, cublasLtDestroy>;
using Description = Owned<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using Layout = Owned<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using Preference = Owned<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

// A problem made ready: everything but the pointers. `found` is false when the library has no algorithm.
struct Plan {
  Description description;
  Layout w, x, out;
  cublasLtMatmulAlgo_t algorithm;
  std::size_t workspace = 0;
  bool found = false;
};

struct Context {
  LtHandle handle;
  LruCache<Plan> plans{512};
};

// cuBLASLt handles and plans belong to one thread and one device.
Context& context(int device) {
  static thread_local std::map<int, Context> contexts;
  Context& context = contexts[device];
  if (!context.handle) {
    cublasLtHandle_t handle = nullptr;
    MLX_CUDA_CHECK(cublasLtCreate(&handle));
    context.handle.reset(handle);
  }
  return context;
}

// NVIDIA's recommendation: 32 MiB from Hopper on, 4 MiB before.
std::size_t workspace_limit(mx::cu::Device& device) {
  return (device.compute_capability_major() >= 9 ? 32u : 4u) << 20;
}

cudaDataType_t data_type(mx::Dtype dtype) {
  return dtype == mx::float32 ? CUDA_R_32F : dtype == mx::float16 ? CUDA_R_16F : CUDA_R_16BF;
}

// MLX's own switch, which it does not export.
bool tf32_enabled() {
  static const bool enabled = [] {
    const char* value = std::getenv("MLX_ENABLE_TF32");
    return !value || std::atoi(value) != 0;
  }();
  return enabled;
}

// The way without fused epilogues is taken by itself where cuBLASLt has none; this makes it testable everywhere.
bool fuses_epilogues() {
  static const bool fuses = [] {
    const char* value = std::getenv("MLX_CUDA_EPILOGUE");
    return !value || std::string_view(value) != "separate";
  }();
  return fuses;
}

cublasComputeType_t compute_type(mx::Dtype dtype) {
  return dtype == mx::float32 && tf32_enabled() ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
}

cublasLtEpilogue_t epilogue(const LinearProblem& problem) {
  switch (problem.activation) {
    case Activation::relu:
      return problem.has_bias ? CUBLASLT_EPILOGUE_RELU_BIAS : CUBLASLT_EPILOGUE_RELU;
    case Activation::gelu_approx:
      return problem.has_bias ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;
    case Activation::none:
      break;
  }
  return problem.has_bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
}

std::uint32_t alignment(const void* pointer) {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer) | 256;
  return static_cast<std::uint32_t>(address & (~address + 1));
}

template <typename T>
void set(const Description& description, cublasLtMatmulDescAttributes_t attribute, const T& value) {
  MLX_CUDA_CHECK(cublasLtMatmulDescSetAttribute(description.get(), attribute, &value, sizeof(value)));
}
template <typename T>
void set(const Preference& preference, cublasLtMatmulPreferenceAttributes_t attribute, const T& value) {
  MLX_CUDA_CHECK(cublasLtMatmulPreferenceSetAttribute(preference.get(), attribute, &value, sizeof(value)));
}

Layout layout(cudaDataType_t type, std::int64_t rows, std::int64_t columns, std::int64_t stride) {
  cublasLtMatrixLayout_t made = nullptr;
  MLX_CUDA_CHECK(cublasLtMatrixLayoutCreate(&made, type, rows, columns, stride));
  return Layout(made);
}

// cuBLASLt is column-major: a row-major matrix is its transpose, so the product asked for is out^T = w x^T, and the bias runs down
// its columns as the epilogue wants it.
Plan make_plan(
    const LinearProblem& problem,
    const void* x,
    const void* w,
    const void* bias,
    const void* out,
    std::size_t workspace,
    cublasLtHandle_t handle) {
  const auto type = data_type(problem.dtype);
  Plan plan;
  cublasLtMatmulDesc_t description = nullptr;
  MLX_CUDA_CHECK(cublasLtMatmulDescCreate(&description, compute_type(problem.dtype), CUDA_R_32F));
  plan.description.reset(description);
  set(plan.description, CUBLASLT_MATMUL_DESC_TRANSA, problem.w_transposed ? CUBLAS_OP_N : CUBLAS_OP_T);
  set(plan.description, CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N);
  set(plan.description, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue(problem));
  if (problem.has_bias) {
    set(plan.description, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, type);
    set(plan.description, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
  }
  plan.w = problem.w_transposed ? layout(type, problem.columns, problem.inner, problem.w_stride)
                                : layout(type, problem.inner, problem.columns, problem.w_stride);
  plan.x = layout(type, problem.inner, problem.rows, problem.x_stride);
  plan.out = layout(type, problem.columns, problem.rows, problem.columns);

  cublasLtMatmulPreference_t made = nullptr;
  MLX_CUDA_CHECK(cublasLtMatmulPreferenceCreate(&made));
  const Preference preference(made);
  set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace);
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment(w));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment(x));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment(out));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment(out));

  cublasLtMatmulHeuristicResult_t result{};
  int count = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
      handle, plan.description.get(), plan.w.get(), plan.x.get(), plan.out.get(), plan.out.get(), preference.get(), 1, &result,
      &count);
  if (status != CUBLAS_STATUS_NOT_SUPPORTED) {
    check(status, "cublasLtMatmulAlgoGetHeuristic");
  }
  plan.found = status == CUBLAS_STATUS_SUCCESS && count > 0 && result.state == CUBLAS_STATUS_SUCCESS;
  plan.algorithm = result.algo;
  plan.workspace = result.workspaceSize;
  return plan;
}

}  // namespace

bool encode_linear(
    const LinearProblem& problem,
    const mx::array& x,
    const mx::array& w,
    const mx::array* bias,
    mx::array& out,
    mx::cu::CommandEncoder& encoder,
    const mx::Stream& stream) {
  if (!fuses_epilogues() && (problem.has_bias || problem.activation != Activation::none)) {
    return false;
  }
  const void* x_data = mx::gpu_ptr<void>(x);
  const void* w_data = mx::gpu_ptr<void>(w);
  const void* bias_data = bias ? mx::gpu_ptr<void>(*bias) : nullptr;
  void* out_data = mx::gpu_ptr<void>(out);
  Context& lt = context(encoder.device().cuda_device());
  const Key key(
      problem.dtype.val(), problem.rows, problem.columns, problem.inner, problem.x_stride, problem.w_stride, problem.w_transposed,
      problem.has_bias, problem.activation, alignment(x_data), alignment(w_data), alignment(bias_data), alignment(out_data));
  Plan& plan = lt.plans.get(key, [&] {
    return make_plan(problem, x_data, w_data, bias_data, out_data, workspace_limit(encoder.device()), lt.handle.get());
  });
  if (!plan.found) {
    return false;
  }
  if (bias) {
    set(plan.description, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias_data);
  }
  // Allocation may add a node of its own to the graph, so it comes before the inputs and outputs of ours are named.
  void* scratch = workspace(plan.workspace, encoder, stream);
  encoder.set_input_array(x);
  encoder.set_input_array(w);
  if (bias) {
    encoder.set_input_array(*bias);
  }
  encoder.set_output_array(out);
  const float one = 1;
  const float zero = 0;
  Capture capture(encoder);
  const cublasStatus_t status = cublasLtMatmul(
      lt.handle.get(), plan.description.get(), &one, w_data, plan.w.get(), x_data, plan.x.get(), &zero, out_data, plan.out.get(),
      out_data, plan.out.get(), &plan.algorithm, scratch, plan.workspace, encoder.stream());
  check(status, "cublasLtMatmul");
  capture.submit();
  return true;
}

}  // namespace mlx_cuda
