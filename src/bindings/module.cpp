// The native module: what python/mlx_cuda calls once it has checked shapes and dtypes and has chosen the fused path.
#include "all_sum/all_sum.h"
#include "bindings/graph.h"
#include "bindings/parts.h"
#include "elementwise/swiglu.h"
#include "matmul/dense/linear.h"
#include "runtime/device_code.h"
#include "runtime/faults.h"
#include "runtime/fused.h"
#include "runtime/memory.h"
#include "runtime/status.h"

#include <cublasLt.h>
#include <cudnn.h>
#include <mlx/version.h>
#include <mlx_cuda_device_code.h>  // written by the build: the digest of the device code next to this module
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>

namespace mlx_cuda {

namespace {

using MaybeName = std::optional<std::string>;

// Versions are encoded as 1000 * major + 10 * minor by the driver, and otherwise by each library in its own way.
std::string dotted(std::size_t version, std::size_t major_unit, std::size_t minor_unit, bool with_patch) {
  std::string text = std::to_string(version / major_unit) + "." + std::to_string(version % major_unit / minor_unit);
  return with_patch ? text + "." + std::to_string(version % minor_unit) : text;
}

nb::dict build_info() {
  nb::dict info;
  info["package"] = MLX_CUDA_PACKAGE;
  info["cuda"] = MLX_CUDA_TOOLKIT_VERSION;
  info["device_code"] = MLX_CUDA_DEVICE_CODE;
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

// Of the first GPU, which rules without a measurement go by.
nb::dict device_figures() {
  CUdevice device = 0;
  MLX_CUDA_CHECK(cuInit(0));
  MLX_CUDA_CHECK(cuDeviceGet(&device, 0));
  nb::dict figures;
  const auto add = [&](const char* name, CUdevice_attribute attribute) {
    int value = 0;
    MLX_CUDA_CHECK(cuDeviceGetAttribute(&value, attribute, device));
    figures[name] = value;
  };
  add("multiprocessors", CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
  add("clock_khz", CU_DEVICE_ATTRIBUTE_CLOCK_RATE);
  add("memory_khz", CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE);
  add("memory_bits", CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH);
  return figures;
}

mx::array run_linear(
    const mx::array& x, const mx::array& w, const MaybeArray& bias, const MaybeName& activation, const mx::Stream& stream) {
  if (activation && activation != "relu" && activation != "gelu_approx") {
    throw std::invalid_argument("[linear] Unknown activation, got '" + *activation + "'.");
  }
  const Activation known = !activation ? Activation::none : activation == "relu" ? Activation::relu : Activation::gelu_approx;
  return linear(x, w, bias, known, stream);
}

// Warns once per reason. If the rules know by now that a library does not support such a call, cached choices are dropped.
void warn(const Unavailable& error) {
  if (error.remembered) {
    forget_calls();
  }
  const std::string reason = error.what();
  static std::mutex mutex;
  static auto& said = *new std::set<std::string>;
  {
    const std::lock_guard lock(mutex);
    if (!said.insert(reason).second) {
      return;
    }
  }
  const nb::gil_scoped_acquire gil;
  const std::string text = reason + " MLX's slower operations compute it.\n  fix: python -m mlx_cuda doctor";
  if (PyErr_WarnEx(PyExc_RuntimeWarning, text.c_str(), 1) == 0) {
    return;
  }
  // There is no Python caller to raise to during MLX's evaluation.
  if (PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) {
    PyErr_Clear();
    PyErr_SetInterrupt();
  } else {
    PyErr_WriteUnraisable(Py_None);  // warnings are errors here
  }
}

}  // namespace

bool is_own(const mx::Primitive& primitive) {
  return dynamic_cast<const Fused*>(&primitive) != nullptr;
}

}  // namespace mlx_cuda

NB_MODULE(MLX_CUDA_MODULE, m) {
  using namespace mlx_cuda;
  nb::module_::import_("mlx.core");  // registers array and Stream

  m.def("linear", &run_linear, "x"_a, "w"_a, "bias"_a.none(), "activation"_a.none(), "stream"_a);
  bind_attention(m);
  bind_matmul(m);
  bind_linear_attention(m);
  bind_call_cache(m);
  bind_decoding(m);
  m.def("all_sum", &all_sum, "x"_a, "group"_a, "stream"_a, nb::call_guard<nb::gil_scoped_release>());
  m.def("all_sum_refusal", &all_sum_refusal, "x"_a, "group"_a);
  m.def("share_memory", &share_memory);
  m.def("swiglu", &swiglu, "gate"_a, "up"_a, "stream"_a);
  m.def("allocation_route", &allocation_route, "stream"_a);
  m.def(
      "add_device_code",
      [](const std::string& source, const nb::bytes& packed) {
        add_device_code(source, {static_cast<const char*>(packed.data()), packed.size()});
      },
      "source"_a, "packed"_a);
  on_unavailable(&warn);
  m.def("inject_fault", &inject_fault, "where"_a, "after"_a);
  m.def("build_info", &build_info);
  m.def("library_versions", &library_versions);
  m.def("device_figures", &device_figures);
}
