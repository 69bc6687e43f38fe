// Python bindings of quantized, gathered, grouped and FP8 matmuls. Python has checked shapes and dtypes, and has chosen the
// engine.
#include "bindings/parts.h"

#include "matmul/dense/cublaslt_tuning.h"
#include "matmul/fp8/fp8.h"
#include "matmul/grouped/primitive.h"
#include "matmul/grouped/upstream_operand.h"
#include "matmul/quantized/choice.h"
#include "matmul/quantized/quantized.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace mlx_cuda {

namespace {

mx::array run_dequantize(
    const mx::array& w,
    const mx::array& scales,
    const MaybeArray& biases,
    int group_size,
    int bits,
    const std::string& mode,
    const mx::Dtype& dtype,
    const mx::Stream& stream) {
  return dequantize({{group_size, bits, mode}, w, scales, biases}, dtype, stream);
}

std::string small_m_kernel(
    const mx::array& x,
    const QuantizedWeights& weights,
    const MaybeArray&,
    const MaybeArray& rhs_indices,
    bool transpose,
    bool small,
    bool,
    const mx::Stream& stream) {
  mx::cu::device(stream.device).make_current();
  const auto pairs = rhs_indices ? std::optional(static_cast<int>(rhs_indices->size())) : std::nullopt;
  const SmallMKernel kernel = choose_small_m(x, weights, pairs, transpose, small);
  return kernel.source.empty() ? "" : kernel.source + " " + kernel.name;
}

// A function of x and quantized weights, which come in their parts, and of what has these names.
template <typename Result, typename... Rest, typename... Names>
void define(
    nb::module_& m,
    const char* name,
    Result (*function)(const mx::array&, const QuantizedWeights&, Rest...),
    const Names&... names) {
  const auto apply = [function](
                         const mx::array& x, const mx::array& w, const mx::array& scales, const MaybeArray& biases, int group_size,
                         int bits, const std::string& mode,
                         Rest... rest) { return function(x, {{group_size, bits, mode}, w, scales, biases}, rest...); };
  m.def(name, apply, "x"_a, "w"_a, "scales"_a, "biases"_a.none(), "group_size"_a, "bits"_a, "mode"_a, names...);
}

// Of grouped_matmul, or with indices of gather_mm.
std::string grouped_name(
    const mx::array& x, const mx::array& w, const MaybeArray& rhs_indices, bool transpose, const mx::Stream& stream) {
  mx::cu::device(stream.device).make_current();
  const KernelName kernel = rhs_indices ? gather_mm_kernel(x, w, *rhs_indices, transpose) : grouped_matmul_kernel(x, w, transpose);
  return kernel.source + (" " + kernel.name);
}

std::pair<mx::array, mx::array> quantize_by_name(const mx::array& x, const std::string& how, const mx::Stream& stream) {
  for (const auto& [name, part] :
       {std::pair("tensor", Fp8Part::tensor), std::pair("row", Fp8Part::row), std::pair("block128", Fp8Part::block),
        std::pair("block128x128", Fp8Part::tile)}) {
    if (how == name) {
      return quantize_fp8(x, part, stream);
    }
  }
  throw std::invalid_argument("[quantize_fp8] Unknown part to scale, got '" + how + "'.");
}

// The key, the algorithm, and the microseconds of it and of the heuristic's choice.
using Tuned = std::tuple<std::string, std::string, double, double>;

std::vector<Tuned> tuned() {
  std::vector<Tuned> all;
  for (const auto& each : all_tuned()) {
    all.emplace_back(each.key, algorithm_text(each.algorithm), each.microseconds, each.first_microseconds);
  }
  return all;
}

void set_tuned(const std::vector<Tuned>& all) {
  std::vector<TunedMatmul> entries;
  for (const auto& [key, text, microseconds, first] : all) {
    entries.push_back({key, {}, microseconds, first});
    if (!algorithm_from(text, entries.back().algorithm)) {
      throw std::invalid_argument("[tune] Not an algorithm: '" + text + "'.");
    }
  }
  replace_tuned(entries);
}

}  // namespace

void bind_matmul(nb::module_& m) {
  m.def(
      "dequantize", &run_dequantize, "w"_a, "scales"_a, "biases"_a.none(), "group_size"_a, "bits"_a, "mode"_a, "dtype"_a,
      "stream"_a);
  define(
      m, "quantized_small_m", &quantized_small_m, "lhs_indices"_a.none(), "rhs_indices"_a.none(), "transpose"_a, "small"_a,
      "sorted_indices"_a, "stream"_a);
  define(
      m, "quantized_kernel", &small_m_kernel, "lhs_indices"_a.none(), "rhs_indices"_a.none(), "transpose"_a, "small"_a,
      "sorted_indices"_a, "stream"_a,
      "The source and the kernel of quantized_small_m for these arguments; empty where MLX's own runs.");
  define(m, "dequantize_then_gemm", &dequantize_then_gemm, "transpose"_a, "stream"_a);
  m.def("grouped_matmul", &grouped_matmul, "x"_a, "w"_a, "offsets"_a, "transpose"_a, "stream"_a);
  define(m, "grouped_quantized", &grouped_quantized, "offsets"_a, "transpose"_a, "stream"_a);
  m.def("expert_offsets", &expert_offsets, "sorted_indices"_a, "experts"_a, "stream"_a);
  m.def(
      "gather_mm", &gather_mm, "x"_a, "w"_a, "lhs_indices"_a.none(), "rhs_indices"_a, "transpose"_a, "sorted_indices"_a,
      "stream"_a);
  m.def(
      "grouped_kernel", &grouped_name, "x"_a, "w"_a, "rhs_indices"_a.none(), "transpose"_a, "stream"_a,
      "The source and the kernel of grouped_matmul or, with indices, of gather_mm for these arguments.");
  m.def("upstream_operand", &upstream_operand, "matrices"_a, "weights"_a, "stream"_a);
  m.def("quantize_fp8", &quantize_by_name, "x"_a, "how"_a, "stream"_a);
  m.def(
      "fp8_matmul", &fp8_matmul, "a"_a, "b"_a, "scale_a"_a.none(), "scale_b"_a.none(), "bias"_a.none(), "out_dtype"_a, "stream"_a);
  m.def("tuning", &set_tuning, "enabled"_a);
  m.def("tuned", &tuned, "The GEMMs timed or given so far: key, algorithm, microseconds, microseconds of the first choice.");
  m.def("set_tuned", &set_tuned, "tuned"_a, "Replaces all known algorithms.");
}

}  // namespace mlx_cuda
