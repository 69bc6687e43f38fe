// The native module: what python/mlx_cuda calls once it has checked shapes and dtypes and has chosen the fused path.
#include "bindings/answered.h"
#include "bindings/attention.h"
#include "bindings/products.h"
#include "primitives/linear.h"
#include "primitives/swiglu.h"
#include "runtime/memory.h"
#include "runtime/status.h"

#include <cublasLt.h>
#include <cudnn.h>
#include <mlx/version.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <stdexcept>
#include <string>

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
  mlx_cuda::bind_attention(m);
  mlx_cuda::bind_remembered_attention(m);
  mlx_cuda::bind_remembered_layouts(m);
  mlx_cuda::bind_products(m);
  m.def("swiglu", &swiglu, "gate"_a, "up"_a, "stream"_a);
  m.def("swiglu_again", &swiglu_again, "gate"_a, "up"_a, "stream"_a.none());
  m.def("allocation_route", &mlx_cuda::allocation_route, "stream"_a);
  m.def("build_info", &build_info);
  m.def("library_versions", &library_versions);
}
