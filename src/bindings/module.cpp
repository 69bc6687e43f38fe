// The native module: what python/mlx_cuda calls once it has checked shapes and dtypes and has chosen the fused path.
#include "bindings/answered.h"
#include "libraries/cudnn_plans.h"
#include "primitives/attention.h"
#include "primitives/decode.h"
#include "primitives/flash.h"
#include "primitives/linear.h"
#include "primitives/paged.h"
#include "primitives/swiglu.h"
#include "runtime/memory.h"
#include "runtime/status.h"

#include <cublasLt.h>
#include <cudnn.h>
#include <mlx/version.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace mx = mlx::core;
namespace nb = nanobind;
using namespace nb::literals;

namespace {

using mlx_cuda::Answered;
using mlx_cuda::call_key;
using mlx_cuda::Key;
using MaybeArray = std::optional<mx::array>;
using MaybeName = std::optional<std::string>;
using MaybeStream = std::optional<mx::Stream>;

thread_local Answered linear_calls;
thread_local Answered attention_calls;
thread_local Answered decode_calls;
thread_local Answered swiglu_calls;

std::optional<mlx_cuda::Activation> activation_from(const MaybeName& name) {
  if (!name) {
    return mlx_cuda::Activation::none;
  }
  if (*name == "relu") {
    return mlx_cuda::Activation::relu;
  }
  if (*name == "gelu_approx") {
    return mlx_cuda::Activation::gelu_approx;
  }
  return std::nullopt;
}

Key linear_key(
    const mx::array& x, const mx::array& w, const MaybeArray& bias, mlx_cuda::Activation activation, const mx::Stream& stream) {
  Key key = bias ? call_key(stream, x, w, *bias) : call_key(stream, x, w);
  key.add(activation);
  return key;
}

Key attention_key(const mx::array& q, const mx::array& k, const mx::array& v, float scale, bool causal, const mx::Stream& stream) {
  Key key = call_key(stream, q, k, v);
  key.add(scale);
  key.add(causal);
  return key;
}

// Versions are encoded as 1000 * major + 10 * minor by the driver, and otherwise by each library in its own way.
std::string dotted(std::size_t version, std::size_t major_unit, std::size_t minor_unit, bool with_patch) {
  std::string text = std::to_string(version / major_unit) + "." + std::to_string(version % major_unit / minor_unit);
  return with_patch ? text + "." + std::to_string(version % minor_unit) : text;
}

nb::dict build_info() {
  nb::dict info;
  info["cuda"] = MLX_CUDA_TOOLKIT_VERSION;
  info["architectures"] = MLX_CUDA_ARCHITECTURES;
  info["nvrtc"] = MLX_CUDA_NVRTC_VERSION;
  info["cudnn_headers"] = dotted(CUDNN_VERSION, 10000, 100, true);
  info["mlx"] =
      std::to_string(MLX_VERSION_MAJOR) + "." + std::to_string(MLX_VERSION_MINOR) + "." + std::to_string(MLX_VERSION_PATCH);
  return info;
}

nb::dict library_versions() {
  int driver = 0;
  MLX_CUDA_CHECK(cuDriverGetVersion(&driver));
  nb::dict versions;
  versions["driver"] = dotted(driver, 1000, 10, false);
  versions["cudnn"] = dotted(cudnnGetVersion(), 10000, 100, true);
  versions["cublaslt"] = dotted(cublasLtGetVersion(), 10000, 100, true);
  return versions;
}

mx::array linear(
    const mx::array& x, const mx::array& w, const MaybeArray& bias, const MaybeName& activation, const mx::Stream& stream) {
  const auto known = activation_from(activation);
  if (!known) {
    throw std::invalid_argument("[linear] Unknown activation, got '" + *activation + "'.");
  }
  mx::array out = mlx_cuda::linear(x, w, bias, *known, stream);
  linear_calls.remember(linear_key(x, w, bias, *known, stream));
  return out;
}

MaybeArray linear_again(
    const mx::array& x, const mx::array& w, const MaybeArray& bias, const MaybeName& activation, const MaybeStream& stream) {
  const auto known = activation_from(activation);
  const mx::Stream on = mlx_cuda::resolve(stream);
  if (!known || !linear_calls.holds(linear_key(x, w, bias, *known, on))) {
    return std::nullopt;
  }
  return mlx_cuda::linear(x, w, bias, *known, on);
}

std::vector<mx::array> attention(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    const MaybeArray& sinks,
    float scale,
    bool causal,
    int window_left,
    bool with_lse,
    bool deterministic,
    const mx::Stream& stream) {
  auto results = mlx_cuda::attention(q, k, v, sinks, {scale, causal, window_left, deterministic}, with_lse, stream);
  if (!sinks && !with_lse && window_left < 0 && !deterministic) {
    attention_calls.remember(attention_key(q, k, v, scale, causal, stream));
  }
  return results;
}

std::string attention_unsupported(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    const MaybeArray& sinks,
    float scale,
    bool causal,
    int window_left,
    bool with_lse,
    const mx::Stream& stream) {
  return mlx_cuda::why_attention_unsupported(q, k, v, sinks, {scale, causal, window_left}, with_lse, stream);
}

// Each step of decoding has another number of keys: it is no part of the key. Nothing depends on it from this number on
// (SHORT_CACHE in _dispatch.py).
constexpr int kManyKeys = 256;

Key decode_key(const mx::array& q, const mx::array& k, const mx::array& v, float scale, bool causal, const mx::Stream& stream) {
  Key key = call_key(stream, q);
  key.add(k.dtype().val());
  key.add(v.dtype().val());
  key.add(k.shape(1));
  key.add(scale);
  key.add(causal);
  return key;
}

bool same_decoding(const mx::array& q, const mx::array& k, const mx::array& v) {
  return k.ndim() == 4 && v.shape() == k.shape() && k.shape(0) == q.shape(0) && k.shape(2) >= kManyKeys && k.shape(3) == q.shape(3);
}

std::vector<mx::array> decode_attention(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    const MaybeArray& mask,
    const MaybeArray& starts,
    const MaybeArray& ends,
    const MaybeArray& sinks,
    float scale,
    float softcap,
    int window_left,
    int window_right,
    bool with_lse,
    const mx::Stream& stream) {
  const mlx_cuda::AttentionOptions options{scale, softcap, window_left, window_right};
  auto results = mlx_cuda::decode_attention(q, k, v, {mask, starts, ends, sinks}, options, with_lse, stream);
  const bool plain = !mask && !starts && !ends && !sinks && softcap == 0 && window_left < 0 && window_right <= 0;
  if (plain && !with_lse && v.shape() == k.shape()) {
    decode_calls.remember(decode_key(q, k, v, scale, window_right == 0, stream));
  }
  return results;
}

std::vector<mx::array> paged_attention(
    const mx::array& q,
    const mx::array& k_pages,
    const mx::array& v_pages,
    const mx::array& table,
    const mx::array& lengths,
    const MaybeArray& sinks,
    float scale,
    float softcap,
    int window_left,
    bool with_lse,
    const mx::Stream& stream) {
  const mlx_cuda::AttentionExtras extras{std::nullopt, std::nullopt, lengths, sinks};
  const mlx_cuda::AttentionOptions options{scale, softcap, window_left, 0};
  return mlx_cuda::decode_attention(q, k_pages, v_pages, extras, options, with_lse, stream, table);
}

MaybeArray attention_again(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    std::optional<double> scale,
    bool causal,
    const MaybeStream& stream) {
  if (q.ndim() != 4) {
    return std::nullopt;
  }
  const mx::Stream on = mlx_cuda::resolve(stream);
  const auto factor = static_cast<float>(scale ? *scale : 1 / std::sqrt(std::max(q.shape(3), 1)));
  if (same_decoding(q, k, v) && decode_calls.holds(decode_key(q, k, v, factor, causal, on))) {
    const mlx_cuda::AttentionOptions options{.scale = factor, .window_right = causal ? 0 : -1};
    return mlx_cuda::decode_attention(q, k, v, {}, options, false, on)[0];
  }
  if (!attention_calls.holds(attention_key(q, k, v, factor, causal, on))) {
    return std::nullopt;
  }
  return mlx_cuda::attention(q, k, v, {}, {.scale = factor, .causal = causal}, false, on)[0];
}

std::vector<mx::array> flash_attention(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    const MaybeArray& mask,
    const MaybeArray& starts,
    const MaybeArray& ends,
    const MaybeArray& sinks,
    float scale,
    float softcap,
    int window_left,
    int window_right,
    bool with_lse,
    const mx::Stream& stream) {
  const mlx_cuda::AttentionOptions options{scale, softcap, window_left, window_right};
  return mlx_cuda::flash_attention(q, k, v, {mask, starts, ends, sinks}, options, with_lse, stream);
}

std::vector<mx::array> flash_varlen(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    const mx::array& cu_q,
    const mx::array& cu_k,
    const MaybeArray& sinks,
    int max_q,
    int max_k,
    float scale,
    float softcap,
    int window_left,
    int window_right,
    bool with_lse,
    const mx::Stream& stream) {
  const mlx_cuda::AttentionOptions options{scale, softcap, window_left, window_right};
  return mlx_cuda::flash_varlen(q, k, v, cu_q, cu_k, sinks, max_q, max_k, options, with_lse, stream);
}

mx::array swiglu(const mx::array& gate, const mx::array& up, const mx::Stream& stream) {
  mx::array out = mlx_cuda::swiglu(gate, up, stream);
  swiglu_calls.remember(call_key(stream, gate, up));
  return out;
}

MaybeArray swiglu_again(const mx::array& gate, const mx::array& up, const MaybeStream& stream) {
  const mx::Stream on = mlx_cuda::resolve(stream);
  if (!swiglu_calls.holds(call_key(on, gate, up))) {
    return std::nullopt;
  }
  return mlx_cuda::swiglu(gate, up, on);
}

}  // namespace

NB_MODULE(MLX_CUDA_MODULE, m) {
  nb::module_::import_("mlx.core");  // registers array and Stream

  m.def("linear", &linear, "x"_a, "w"_a, "bias"_a.none(), "activation"_a.none(), "stream"_a);
  m.def("linear_again", &linear_again, "x"_a, "w"_a, "bias"_a.none(), "activation"_a.none(), "stream"_a.none());
  m.def(
      "attention", &attention, "q"_a, "k"_a, "v"_a, "sinks"_a.none(), "scale"_a, "causal"_a, "window_left"_a, "with_lse"_a,
      "deterministic"_a, "stream"_a);
  m.def(
      "decode_attention", &decode_attention, "q"_a, "k"_a, "v"_a, "mask"_a.none(), "starts"_a.none(), "ends"_a.none(),
      "sinks"_a.none(), "scale"_a, "softcap"_a, "window_left"_a, "window_right"_a, "with_lse"_a, "stream"_a);
  m.def(
      "flash_attention", &flash_attention, "q"_a, "k"_a, "v"_a, "mask"_a.none(), "starts"_a.none(), "ends"_a.none(),
      "sinks"_a.none(), "scale"_a, "softcap"_a, "window_left"_a, "window_right"_a, "with_lse"_a, "stream"_a);
  m.def(
      "flash_varlen", &flash_varlen, "q"_a, "k"_a, "v"_a, "cu_q"_a, "cu_k"_a, "sinks"_a.none(), "max_q"_a, "max_k"_a, "scale"_a,
      "softcap"_a, "window_left"_a, "window_right"_a, "with_lse"_a, "stream"_a);
  m.def(
      "paged_attention", &paged_attention, "q"_a, "k_pages"_a, "v_pages"_a, "block_table"_a, "lengths"_a, "sinks"_a.none(),
      "scale"_a, "softcap"_a, "window_left"_a, "with_lse"_a, "stream"_a);
  m.def(
      "paged_cache_update", &mlx_cuda::paged_cache_update, "k_pages"_a, "v_pages"_a, "keys"_a, "values"_a, "block_table"_a,
      "lengths"_a, "stream"_a);
  m.def("attention_again", &attention_again, "q"_a, "k"_a, "v"_a, "scale"_a.none(), "causal"_a, "stream"_a.none());
  m.def(
      "attention_unsupported", &attention_unsupported, "q"_a, "k"_a, "v"_a, "sinks"_a.none(), "scale"_a, "causal"_a,
      "window_left"_a, "with_lse"_a, "stream"_a, "Why cuDNN does not take these shapes; empty when it does.");
  m.def("attention_plans", &mlx_cuda::plans_built, "How many plans of cuDNN this process has built.");
  m.def("swiglu", &swiglu, "gate"_a, "up"_a, "stream"_a);
  m.def("swiglu_again", &swiglu_again, "gate"_a, "up"_a, "stream"_a.none());
  m.def("allocation_route", &mlx_cuda::allocation_route, "stream"_a);
  m.def("build_info", &build_info);
  m.def("library_versions", &library_versions);
}
