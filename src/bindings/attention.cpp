// The engines of attention, as Python calls them: it has checked shapes and dtypes, and has chosen.
#include "attention/cudnn/attention.h"
#include "attention/cudnn/plans.h"
#include "attention/decode/primitive.h"
#include "attention/flash/primitive.h"
#include "attention/paged/primitive.h"
#include "attention/quantized/primitive.h"
#include "bindings/attention_options.h"
#include "bindings/parts.h"

#include <mlx/backend/cuda/device.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <string>
#include <tuple>

namespace mlx_cuda {

namespace {

// A function of a call, some of which have a block table.
template <auto function, typename... Table>
auto run(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    nb::handle options,
    const mx::Stream& stream,
    const Table&... table) {
  AttentionArrays in = arrays_of(q, k, v, options);
  ((in.table = table), ...);
  return function(in, options_of(options), stream);
}

Arrays run_varlen(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    const mx::array& cu_q,
    const mx::array& cu_k,
    int max_q,
    int max_k,
    nb::handle options,
    const mx::Stream& stream) {
  return flash_varlen({q, k, v, cu_q, cu_k, arrays_of(q, k, v, options).sinks}, {max_q, max_k}, options_of(options), stream);
}

// A cache's keys or values, and their quantization.
using Packed = std::tuple<mx::array, mx::array, MaybeArray>;
using Form = std::tuple<int, int, std::string>;

std::string quantized_kernel_name(
    const AttentionArrays& in, const QuantizedCache& cache, const AttentionOptions& options, const mx::Stream& stream) {
  mx::cu::device(stream.device).make_current();
  return quantized_attention_kernel(in, cache, options);
}

// Of quantized_attention and of what is asked of it.
template <auto function>
auto run_quantized(
    const mx::array& q,
    const Packed& k,
    const Packed& v,
    const Form& form,
    nb::handle options,
    const mx::Stream& stream,
    const MaybeArray& block_table) {
  const auto& [group_size, bits, mode] = form;
  auto weights = [&](const Packed& of) -> QuantizedWeights {
    const auto& [w, scales, biases] = of;
    return {{group_size, bits, mode}, w, scales, biases};
  };
  AttentionArrays in = arrays_of(q, std::get<0>(k), std::get<0>(v), options);
  in.table = block_table;
  return function(in, {weights(k), weights(v)}, options_of(options), stream);
}

// Of the engines "decode" and "flash".
std::string kernel_name(
    const std::string& engine,
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    nb::handle options,
    const mx::Stream& stream) {
  mx::cu::device(stream.device).make_current();
  return (engine == "decode" ? decode_kernel : flash_kernel)(arrays_of(q, k, v, options), options_of(options));
}

}  // namespace

void bind_attention(nb::module_& m) {
  m.def("cudnn_attention", &run<attention>, "q"_a, "k"_a, "v"_a, "options"_a, "stream"_a);
  m.def(
      "cudnn_refusal", &run<why_attention_unsupported>, "q"_a, "k"_a, "v"_a, "options"_a, "stream"_a,
      "Why cuDNN does not take these shapes; empty when it does.");
  m.def(
      "decode_attention", &run<decode_attention, MaybeArray>, "q"_a, "k"_a, "v"_a, "options"_a, "stream"_a,
      "block_table"_a.none() = nb::none());
  m.def(
      "quantized_attention", &run_quantized<quantized_attention>, "q"_a, "k"_a, "v"_a, "form"_a, "options"_a, "stream"_a,
      "block_table"_a.none() = nb::none());
  m.def(
      "quantized_attention_kernel", &run_quantized<quantized_kernel_name>, "q"_a, "k"_a, "v"_a, "form"_a, "options"_a, "stream"_a,
      "block_table"_a.none() = nb::none());
  m.def("flash_attention", &run<flash_attention>, "q"_a, "k"_a, "v"_a, "options"_a, "stream"_a);
  m.def("flash_varlen", &run_varlen, "q"_a, "k"_a, "v"_a, "cu_q"_a, "cu_k"_a, "max_q"_a, "max_k"_a, "options"_a, "stream"_a);
  m.def("attention_kernel", &kernel_name, "engine"_a, "q"_a, "k"_a, "v"_a, "options"_a, "stream"_a);
  m.def(
      "paged_cache_update", &paged_cache_update, "k_pages"_a, "v_pages"_a, "keys"_a, "values"_a, "block_table"_a, "lengths"_a,
      "stream"_a);
  m.def(
      "write_to_pages", &write_to_pages, "pages"_a, "rows"_a, "block_table"_a, "lengths"_a, "stream"_a,
      nb::call_guard<nb::gil_scoped_release>());
  m.def("row_sums", &row_sums, "rows"_a, "seed"_a, "stream"_a, nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "traced",
      [](const Arrays& arrays) {
        return std::any_of(arrays.begin(), arrays.end(), [](const mx::array& in) { return in.is_tracer(); });
      },
      "arrays"_a, "Whether a function of these may be differentiated or otherwise transformed.");
  m.def(
      "evaluated",
      [](const Arrays& arrays) {
        return std::all_of(
            arrays.begin(), arrays.end(), [](const mx::array& in) { return in.status() != mx::array::Status::unscheduled; });
      },
      "arrays"_a, "Whether all of these have been evaluated, or are being evaluated.");
  m.def("attention_plans", &plans_built, "How many plans of cuDNN this process has built.");
}

}  // namespace mlx_cuda
