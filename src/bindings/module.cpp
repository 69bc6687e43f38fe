// The native module: what python/mlx_cuda calls once it has checked shapes and dtypes and has chosen the fused path.
#include "primitives/attention.h"
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

#include <stdexcept>
#include <string>

namespace nb = nanobind;
using namespace nb::literals;

namespace {

mlx_cuda::Activation activation_from(const std::string& name) {
  if (name == "none") {
    return mlx_cuda::Activation::none;
  }
  if (name == "relu") {
    return mlx_cuda::Activation::relu;
  }
  if (name == "gelu_approx") {
    return mlx_cuda::Activation::gelu_approx;
  }
  throw std::invalid_argument("[linear] Unknown activation, got '" + name + "'.");
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

}  // namespace

NB_MODULE(MLX_CUDA_MODULE, m) {
  nb::module_::import_("mlx.core");  // registers array and Stream

  m.def(
      "linear",
      [](const mlx_cuda::mx::array& x, const mlx_cuda::mx::array& w, const std::optional<mlx_cuda::mx::array>& bias,
         const std::string& activation,
         const mlx_cuda::mx::Stream& stream) { return mlx_cuda::linear(x, w, bias, activation_from(activation), stream); },
      "x"_a, "w"_a, "bias"_a.none(), "activation"_a, "stream"_a);
  m.def("attention", &mlx_cuda::attention, "q"_a, "k"_a, "v"_a, "scale"_a, "causal"_a, "stream"_a);
  m.def(
      "attention_unsupported", &mlx_cuda::why_attention_unsupported, "q"_a, "k"_a, "v"_a, "scale"_a, "causal"_a, "stream"_a,
      "Why cuDNN does not take these shapes; empty when it does.");
  m.def("swiglu", &mlx_cuda::swiglu, "gate"_a, "up"_a, "stream"_a);
  m.def("allocation_route", &mlx_cuda::allocation_route, "stream"_a);
  m.def("build_info", &build_info);
  m.def("library_versions", &library_versions);
}
