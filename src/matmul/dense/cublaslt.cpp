#include "matmul/dense/cublaslt.h"

#include "matmul/dense/cublaslt_timing.h"
#include "matmul/dense/cublaslt_tuning.h"
#include "runtime/capture.h"
#include "runtime/device_code.h"
#include "runtime/faults.h"
#include "runtime/lru.h"
#include "runtime/status.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

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

}  // namespace

// A problem made ready: everything but the pointers.
struct MatmulPlan {
  cublasLtHandle_t handle = nullptr;  // of the thread's context, which lives as long
  Description description;
  Layout w, x, out;
  std::optional<Candidate> chosen;  // none when the library has no algorithm
  bool fp8 = false;
};

namespace {

struct Context {
  LtHandle handle;
  LruCache<std::shared_ptr<MatmulPlan>> plans{512};
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
std::size_t workspace_limit() {
  return (compute_capability() >= 90 ? 32u : 4u) << 20;
}

cudaDataType_t data_type(mx::Dtype dtype) {
  switch (dtype.val()) {
    case mx::Dtype::Val::float32:
      return CUDA_R_32F;
    case mx::Dtype::Val::float16:
      return CUDA_R_16F;
    case mx::Dtype::Val::uint8:
      return CUDA_R_8F_E4M3;
    default:
      return CUDA_R_16BF;
  }
}

// MLX's own switch, which it does not export.
bool tf32_enabled() {
  static const char* const value = std::getenv("MLX_ENABLE_TF32");
  static const bool enabled = !value || std::atoi(value) != 0;
  return enabled;
}

// The way without fused epilogues is taken by itself where cuBLASLt has none; this makes it testable everywhere.
bool fuses_epilogues() {
  static const char* const value = std::getenv("MLX_CUDA_EPILOGUE");
  static const bool fuses = !value || std::string_view(value) != "separate";
  return fuses;
}

cublasComputeType_t compute_type(mx::Dtype dtype) {
  return dtype == mx::float32 && tf32_enabled() ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
}

cublasLtEpilogue_t epilogue(const MatmulProblem& problem) {
  const bool bias = problem.has_bias;
  switch (problem.activation) {
    case Activation::relu:
      return bias ? CUBLASLT_EPILOGUE_RELU_BIAS : CUBLASLT_EPILOGUE_RELU;
    case Activation::gelu_approx:
      if (problem.keeps_inside) {
        return bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
      }
      return bias ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;
    case Activation::none:
      break;
  }
  return bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
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

Layout layout(cudaDataType_t type, std::int64_t rows, std::int64_t columns, std::int64_t stride, bool transposed = false) {
  if (transposed) {
    std::swap(rows, columns);
  }
  cublasLtMatrixLayout_t made = nullptr;
  MLX_CUDA_CHECK(cublasLtMatrixLayoutCreate(&made, type, rows, columns, stride));
  return Layout(made);
}

void set_pointers(const MatmulPlan& plan, const MatmulPointers& pointers) {
  const Description& description = plan.description;
  if (plan.fp8) {  // null is a scale of 1
    set(description, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, pointers.w_scale);
    set(description, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, pointers.x_scale);
  }
  if (pointers.bias) {
    set(description, CUBLASLT_MATMUL_DESC_BIAS_POINTER, pointers.bias);
  }
  if (pointers.inside) {
    set(description, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, pointers.inside);
  }
}

// cuBLASLt is column-major: a row-major matrix is its transpose, so the GEMM is out^T = w x^T, and the bias is per row of the
// result, as the epilogue needs it. False if the library does not support the problem.
bool describe_problem(const MatmulProblem& problem, MatmulPlan& plan) {
  const auto type = data_type(problem.dtype);
  cublasLtMatmulDesc_t description = nullptr;
  MLX_CUDA_CHECK(cublasLtMatmulDescCreate(&description, compute_type(problem.dtype), CUDA_R_32F));
  plan.description.reset(description);
  set(plan.description, CUBLASLT_MATMUL_DESC_TRANSA, problem.w_transposed ? CUBLAS_OP_N : CUBLAS_OP_T);
  set(plan.description, CUBLASLT_MATMUL_DESC_TRANSB, problem.x_transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(plan.description, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue(problem));
  if (problem.has_bias) {
    set(plan.description, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, data_type(problem.out_dtype));
  }
  if (problem.keeps_inside) {
    set(plan.description, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, problem.columns);
  }
  plan.w = layout(type, problem.inner, problem.columns, problem.w_stride, problem.w_transposed);
  plan.x = layout(type, problem.inner, problem.rows, problem.x_stride, problem.x_transposed);
  plan.out = layout(data_type(problem.out_dtype), problem.columns, problem.rows, problem.out_stride);
  // FP8 GEMMs accumulate in float32: CUBLASLT_MATMUL_DESC_FAST_ACCUM is off.
  auto knows = [&](cublasLtMatmulDescAttributes_t attribute, Scaling scaling) {
    return scaling == Scaling::tensor ||
           succeeded(cublasLtMatmulDescSetAttribute(plan.description.get(), attribute, &scaling, sizeof(scaling)));
  };
  return knows(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, problem.w_scaling) && knows(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, problem.x_scaling);
}

// The library's candidates, best first.
std::vector<Candidate> candidates(const MatmulPlan& plan, const MatmulPointers& pointers, std::size_t workspace, int most) {
  cublasLtMatmulPreference_t made = nullptr;
  MLX_CUDA_CHECK(cublasLtMatmulPreferenceCreate(&made));
  const Preference preference(made);
  set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace);
  // Parts of a sum are added in float32: in 16 bits each addition costs a rounding, which adds up where K is in a dozen parts.
  set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, std::uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment(pointers.w));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment(pointers.x));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment(pointers.out));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment(pointers.out));
  std::vector<Candidate> results(static_cast<std::size_t>(most));
  int count = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
      plan.handle, plan.description.get(), plan.w.get(), plan.x.get(), plan.out.get(), plan.out.get(), preference.get(), most,
      results.data(), &count);
  // An unknown combination of scalings is an invalid value.
  if (status != CUBLAS_STATUS_NOT_SUPPORTED && status != CUBLAS_STATUS_INVALID_VALUE) {
    check(status, "cublasLtMatmulAlgoGetHeuristic");
  }
  results.resize(status == CUBLAS_STATUS_SUCCESS ? static_cast<std::size_t>(count) : 0);
  std::erase_if(results, [](const Candidate& result) { return result.state != CUBLAS_STATUS_SUCCESS; });
  return results;
}

cublasStatus_t run(
    const MatmulPlan& plan, const Candidate& candidate, const MatmulPointers& pointers, void* workspace, cudaStream_t stream) {
  const float one = 1;
  const float zero = 0;
  return cublasLtMatmul(
      plan.handle, plan.description.get(), &one, pointers.w, plan.w.get(), pointers.x, plan.x.get(), &zero, pointers.out,
      plan.out.get(), pointers.out, plan.out.get(), &candidate.algo, workspace, candidate.workspaceSize, stream);
}

// ---------------------------------------------------------------------------------------------------------------- tuning
constexpr int kCandidates = 16;
constexpr double kWorthwhile = 0.98;  // of the first's time: less would be noise

std::string problem_text(const MatmulProblem& problem, const MatmulPointers& pointers) {
  auto name = [](mx::Dtype dtype) { return std::to_string(data_type(dtype)); };
  std::string text = std::to_string(problem.rows) + "x" + std::to_string(problem.columns) + "x" + std::to_string(problem.inner);
  text += " types " + name(problem.dtype) + ">" + name(problem.out_dtype);
  text += std::string(problem.x_transposed ? " T" : " N") + (problem.w_transposed ? "N" : "T");
  text += " strides";
  for (const auto stride : {problem.x_stride, problem.w_stride, problem.out_stride}) {
    text += " " + std::to_string(stride);
  }
  text += " epilogue " + std::to_string(epilogue(problem)) + " compute " + std::to_string(compute_type(problem.dtype));
  text += " scaling " + std::to_string(static_cast<int>(problem.x_scaling)) + std::to_string(static_cast<int>(problem.w_scaling));
  text += " alignment";
  for (const void* pointer : {pointers.x, pointers.w, static_cast<const void*>(pointers.out)}) {
    text += " " + std::to_string(alignment(pointer));
  }
  return text;
}

// Times the candidates, stores the best and puts it first. Without enough memory, nothing changes.
void tune(
    const MatmulProblem& problem,
    const std::string& key,
    const MatmulPlan& plan,
    CommandEncoder& encoder,
    std::vector<Candidate>& found) {
  MLX_CUDA_CHECK(cuStreamSynchronize(encoder.stream()));  // whatever else runs takes a part of the GPU
  const auto timed = time_candidates(
      problem, found, [&](const Candidate& candidate, const MatmulPointers& pointers, void* workspace, cudaStream_t stream) {
        set_pointers(plan, pointers);
        return run(plan, candidate, pointers, workspace, stream);
      });
  if (!timed) {
    return;
  }
  const std::vector<double>& times = *timed;
  const auto fastest = static_cast<std::size_t>(std::min_element(times.begin(), times.end()) - times.begin());
  const std::size_t chosen = times[fastest] < kWorthwhile * times[0] ? fastest : 0;
  std::swap(found[0], found[chosen]);
  store_tuned({key, found[0].algo, times[chosen], times[0]});
}

// ---------------------------------------------------------------------------------------------------------------- plans
// An algorithm that was timed before, if it is one of this library.
std::optional<Candidate> checked(const MatmulPlan& plan, const std::optional<TunedMatmul>& tuned) {
  Candidate candidate{};
  if (!tuned || !succeeded(cublasLtMatmulAlgoCheck(
                    plan.handle, plan.description.get(), plan.w.get(), plan.x.get(), plan.out.get(), plan.out.get(),
                    &tuned->algorithm, &candidate))) {
    return std::nullopt;
  }
  candidate.algo = tuned->algorithm;
  return candidate.workspaceSize <= workspace_limit() ? std::optional(candidate) : std::nullopt;
}

// Without an encoder, only to see whether there is an algorithm.
std::shared_ptr<MatmulPlan> make_plan(
    const MatmulProblem& problem, const MatmulPointers& pointers, CommandEncoder* encoder, cublasLtHandle_t handle) {
  auto plan = std::make_shared<MatmulPlan>();
  plan->handle = handle;
  plan->fp8 = problem.dtype == mx::uint8;
  if (!describe_problem(problem, *plan)) {
    return plan;
  }
  set_pointers(*plan, pointers);
  const bool timed = encoder && tuning();
  std::string key;
  if (timed || (encoder && any_tuned())) {
    key = tuning_place() + ": " + problem_text(problem, pointers);
    plan->chosen = checked(*plan, find_tuned(key));
  }
  if (!plan->chosen) {
    std::vector<Candidate> found = candidates(*plan, pointers, workspace_limit(), timed ? kCandidates : 1);
    if (timed && found.size() > 1) {
      tune(problem, key, *plan, *encoder, found);
    }
    plan->chosen = found.empty() ? std::nullopt : std::optional(found[0]);
  }
  return plan;
}

std::shared_ptr<MatmulPlan> plan_of(
    const MatmulProblem& problem, const MatmulPointers& pointers, mx::cu::Device& device, CommandEncoder* encoder) {
  Context& lt = context(device.cuda_device());
  const Key key(
      problem.dtype.val(), problem.out_dtype.val(), problem.rows, problem.columns, problem.inner, problem.x_stride,
      problem.w_stride, problem.out_stride, problem.x_transposed, problem.w_transposed, problem.has_bias, problem.keeps_inside,
      problem.activation, problem.x_scaling, problem.w_scaling, alignment(pointers.x), alignment(pointers.w),
      alignment(pointers.bias), alignment(pointers.out), alignment(pointers.inside), encoder != nullptr, tuning_generation());
  return lt.plans.get(key, [&] { return make_plan(problem, pointers, encoder, lt.handle.get()); });
}

}  // namespace

std::optional<ReadyMatmul> prepare_matmul(
    const MatmulProblem& problem, const MatmulPointers& pointers, CommandEncoder& encoder, const mx::Stream& stream) {
  if (!fuses_epilogues() && (problem.has_bias || problem.activation != Activation::none)) {
    return std::nullopt;
  }
  auto plan = plan_of(problem, pointers, encoder.device(), &encoder);
  if (!plan->chosen || fault("cublaslt")) {
    return std::nullopt;
  }
  void* scratch = workspace(plan->chosen->workspaceSize, encoder, stream);
  return ReadyMatmul{std::move(plan), pointers, scratch};
}

void encode_matmul(const ReadyMatmul& matmul, CommandEncoder& encoder) {
  const MatmulPlan& plan = *matmul.plan;
  set_pointers(plan, matmul.pointers);
  Capture capture(encoder);
  check(run(plan, *plan.chosen, matmul.pointers, matmul.workspace, encoder.stream()), "cublasLtMatmul");
  capture.submit();
}

bool can_matmul(const MatmulProblem& problem, mx::cu::Device& device) {
  void* const somewhere = reinterpret_cast<void*>(std::uintptr_t{1} << 32);
  return plan_of(problem, {somewhere, somewhere, somewhere, somewhere, somewhere, somewhere, somewhere}, device, nullptr)
      ->chosen.has_value();
}

}  // namespace mlx_cuda
