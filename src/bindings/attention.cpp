// The engines of attention, as Python calls them: it has checked shapes and dtypes, and has chosen.
#include "bindings/attention.h"
#include "attention/cudnn/forward.h"
#include "attention/cudnn/plans.h"
#include "attention/decode/primitive.h"
#include "attention/flash/primitive.h"
#include "attention/paged/primitive.h"

#include <nanobind/stl/optional.h>
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

using MaybeArray = std::optional<mx::array>;

std::vector<mx::array> run_cudnn(
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
  return attention(q, k, v, sinks, {scale, causal, window_left, deterministic}, with_lse, stream);
}

std::string cudnn_refusal(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    const MaybeArray& sinks,
    float scale,
    bool causal,
    int window_left,
    bool with_lse,
    const mx::Stream& stream) {
  return why_attention_unsupported(q, k, v, sinks, {scale, causal, window_left}, with_lse, stream);
}

std::vector<mx::array> run_decode(
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
  const AttentionOptions options{scale, softcap, window_left, window_right};
  return decode_attention(q, k, v, {mask, starts, ends, sinks}, options, with_lse, stream);
}

std::vector<mx::array> run_paged(
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
  const AttentionExtras extras{std::nullopt, std::nullopt, lengths, sinks};
  const AttentionOptions options{scale, softcap, window_left, 0};
  return decode_attention(q, k_pages, v_pages, extras, options, with_lse, stream, table);
}

std::vector<mx::array> run_flash(
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
  const AttentionOptions options{scale, softcap, window_left, window_right};
  return flash_attention(q, k, v, {mask, starts, ends, sinks}, options, with_lse, stream);
}

std::vector<mx::array> run_varlen(
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
  const AttentionOptions options{scale, softcap, window_left, window_right};
  return flash_varlen(q, k, v, cu_q, cu_k, sinks, max_q, max_k, options, with_lse, stream);
}

}  // namespace

void bind_attention(nb::module_& m) {
  m.def(
      "attention", &run_cudnn, "q"_a, "k"_a, "v"_a, "sinks"_a.none(), "scale"_a, "causal"_a, "window_left"_a, "with_lse"_a,
      "deterministic"_a, "stream"_a);
  m.def(
      "decode_attention", &run_decode, "q"_a, "k"_a, "v"_a, "mask"_a.none(), "starts"_a.none(), "ends"_a.none(), "sinks"_a.none(),
      "scale"_a, "softcap"_a, "window_left"_a, "window_right"_a, "with_lse"_a, "stream"_a);
  m.def(
      "flash_attention", &run_flash, "q"_a, "k"_a, "v"_a, "mask"_a.none(), "starts"_a.none(), "ends"_a.none(), "sinks"_a.none(),
      "scale"_a, "softcap"_a, "window_left"_a, "window_right"_a, "with_lse"_a, "stream"_a);
  m.def(
      "flash_varlen", &run_varlen, "q"_a, "k"_a, "v"_a, "cu_q"_a, "cu_k"_a, "sinks"_a.none(), "max_q"_a, "max_k"_a, "scale"_a,
      "softcap"_a, "window_left"_a, "window_right"_a, "with_lse"_a, "stream"_a);
  m.def(
      "paged_attention", &run_paged, "q"_a, "k_pages"_a, "v_pages"_a, "block_table"_a, "lengths"_a, "sinks"_a.none(), "scale"_a,
      "softcap"_a, "window_left"_a, "with_lse"_a, "stream"_a);
  m.def(
      "paged_cache_update", &paged_cache_update, "k_pages"_a, "v_pages"_a, "keys"_a, "values"_a, "block_table"_a, "lengths"_a,
      "stream"_a);
  m.def(
      "traced",
      [](const std::vector<mx::array>& arrays) {
        return std::any_of(arrays.begin(), arrays.end(), [](const mx::array& in) { return in.is_tracer(); });
      },
      "arrays"_a, "Whether gradients, or other transformations, of a function of these may be asked for.");
  m.def(
      "attention_unsupported", &cudnn_refusal, "q"_a, "k"_a, "v"_a, "sinks"_a.none(), "scale"_a, "causal"_a, "window_left"_a,
      "with_lse"_a, "stream"_a, "Why cuDNN does not take these shapes; empty when it does.");
  m.def("attention_plans", &plans_built, "How many plans of cuDNN this process has built.");
}

}  // namespace mlx_cuda
