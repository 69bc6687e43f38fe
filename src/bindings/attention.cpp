// The engines of attention, as Python calls them: it has checked shapes and dtypes, and has chosen.
#include "bindings/attention.h"

#include "attention/cudnn/forward.h"
#include "attention/cudnn/plans.h"
#include "attention/decode/primitive.h"
#include "attention/flash/primitive.h"
#include "attention/paged/primitive.h"
#include "bindings/attention_options.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

namespace mlx_cuda {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Arrays = std::vector<mx::array>;

CudnnOptions cudnn_options(const CheckedOptions& given) {
  return {given.options.scale, given.options.window_right == 0, given.options.window_left, given.deterministic};
}

Arrays run_cudnn(const mx::array& q, const mx::array& k, const mx::array& v, nb::handle options, const mx::Stream& stream) {
  const CheckedOptions given = checked_options(options);
  return attention(q, k, v, given.extras.sinks, cudnn_options(given), given.lse, stream);
}

std::string cudnn_refusal(
    const mx::array& q, const mx::array& k, const mx::array& v, nb::handle options, const mx::Stream& stream) {
  const CheckedOptions given = checked_options(options);
  return why_attention_unsupported(q, k, v, given.extras.sinks, cudnn_options(given), given.lse, stream);
}

Arrays run_decode(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    nb::handle options,
    const mx::Stream& stream,
    const std::optional<mx::array>& block_table) {
  const CheckedOptions given = checked_options(options);
  return decode_attention(q, k, v, given.extras, given.options, given.lse, stream, block_table);
}

Arrays run_flash(const mx::array& q, const mx::array& k, const mx::array& v, nb::handle options, const mx::Stream& stream) {
  const CheckedOptions given = checked_options(options);
  return flash_attention(q, k, v, given.extras, given.options, given.lse, stream);
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
  const CheckedOptions given = checked_options(options);
  return flash_varlen(q, k, v, cu_q, cu_k, given.extras.sinks, max_q, max_k, given.options, given.lse, stream);
}

}  // namespace

void bind_attention(nb::module_& m) {
  m.def("cudnn_attention", &run_cudnn, "q"_a, "k"_a, "v"_a, "options"_a, "stream"_a);
  m.def(
      "cudnn_refusal", &cudnn_refusal, "q"_a, "k"_a, "v"_a, "options"_a, "stream"_a,
      "Why cuDNN does not take these shapes; empty when it does.");
  m.def("decode_attention", &run_decode, "q"_a, "k"_a, "v"_a, "options"_a, "stream"_a, "block_table"_a.none() = nb::none());
  m.def("flash_attention", &run_flash, "q"_a, "k"_a, "v"_a, "options"_a, "stream"_a);
  m.def("flash_varlen", &run_varlen, "q"_a, "k"_a, "v"_a, "cu_q"_a, "cu_k"_a, "max_q"_a, "max_k"_a, "options"_a, "stream"_a);
  m.def(
      "paged_cache_update", &paged_cache_update, "k_pages"_a, "v_pages"_a, "keys"_a, "values"_a, "block_table"_a, "lengths"_a,
      "stream"_a);
  m.def(
      "traced",
      [](const Arrays& arrays) {
        return std::any_of(arrays.begin(), arrays.end(), [](const mx::array& in) { return in.is_tracer(); });
      },
      "arrays"_a, "Whether gradients, or other transformations, of a function of these may be asked for.");
  m.def("attention_plans", &plans_built, "How many plans of cuDNN this process has built.");
}

}  // namespace mlx_cuda
