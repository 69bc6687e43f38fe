// The native module: what python/mlx_cuda calls once it has checked shapes and dtypes and has chosen the fused path. Only this
// file is compiled for each CUDA version.
#include "bindings/parts.h"

#include <cudnn_version.h>
#include <mlx/version.h>
#include <mlx_cuda_device_code.h>  // written by the build: the digest of the device code next to this module
#include <nanobind/stl/string.h>

#include <string>

namespace mlx_cuda {

namespace {

std::string dotted(int major, int minor, int patch) {
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(patch);
}

nb::dict build_info() {
  nb::dict info;
  info["package"] = MLX_CUDA_PACKAGE;
  info["cuda"] = MLX_CUDA_TOOLKIT_VERSION;
  info["device_code"] = MLX_CUDA_DEVICE_CODE;
  info["cudnn_headers"] = dotted(CUDNN_MAJOR, CUDNN_MINOR, CUDNN_PATCHLEVEL);
  info["mlx"] = dotted(MLX_VERSION_MAJOR, MLX_VERSION_MINOR, MLX_VERSION_PATCH);
  return info;
}

}  // namespace

}  // namespace mlx_cuda

NB_MODULE(MLX_CUDA_MODULE, m) {
  using namespace mlx_cuda;
  nb::module_::import_("mlx.core");  // registers array and Stream

  bind_attention(m);
  bind_matmul(m);
  bind_linear_attention(m);
  bind_call_cache(m);
  bind_decoding(m);
  bind_runtime(m);
  m.def("build_info", &build_info);
}
