// Calls of attention from pages and of packed sequences that are answered before Python looks at them: see
// remembered_attention.cpp.
#include "attention/decode/primitive.h"
#include "attention/flash/primitive.h"
#include "bindings/attention.h"
#include "bindings/attention_call.h"

#include <mlx/ops.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>

#include <limits>
#include <optional>
#include <variant>

namespace mlx_cuda {

using namespace nb::literals;

namespace {

thread_local Answered paged_calls;
thread_local Answered varlen_calls;

// The arguments of `paged_attention` in python/mlx_cuda/_attention/paged.py, but for force_fused: only calls of the decode kernel are kept.
struct PagedArguments {
  const mx::array& q;
  const mx::array& k_pages;
  const mx::array& v_pages;
  const mx::array& block_table;
  const mx::array& lengths;
  const MaybeNumber& scale;
  nb::handle window_size;
  const MaybeNumber& softcap;
  const MaybeArray& sinks;
  bool return_lse;

  std::optional<Call> call() const {
    auto rows = [](const mx::array& in) { return in.ndim() == 4 && in.size() > 0; };
    const bool pages = rows(q) && rows(k_pages) && rows(v_pages) && same_dtype(q, k_pages, v_pages) &&
                       same_sizes(q, k_pages, {3}) && same_sizes(k_pages, v_pages, {0, 1, 2});
    const bool placed = block_table.ndim() == 2 && block_table.size() > 0 && block_table.dtype() == mx::int32;
    if (!pages || !placed || block_table.shape(0) != q.shape(0) || nb::isinstance<nb::tuple>(window_size)) {
      return std::nullopt;
    }
    Call call{.extras = {std::nullopt, std::nullopt, lengths, sinks}, .lse = return_lse};
    if (!is_vector(lengths, q.shape(0), mx::int32) || !is_vector(sinks, q.shape(1), q.dtype()) ||
        !read_numbers(call, scale, softcap, q.shape(3)) ||
        !read_window(call, window_size, block_table.shape(1) * k_pages.shape(2))) {
      return std::nullopt;
    }
    call.options.window_right = 0;
    return call;
  }

  Key key(const Call& call, const mx::Stream& stream) const {
    const mx::Shape& pages = k_pages.shape();
    return key_of(call, q.dtype(), {q.shape(0), q.shape(1), q.shape(2), q.shape(3), pages[1], pages[2], v_pages.shape(3)}, stream);
  }
};

void remember_paged(
    const mx::array& q,
    const mx::array& k_pages,
    const mx::array& v_pages,
    const mx::array& block_table,
    const mx::array& lengths,
    const MaybeNumber& scale,
    nb::handle window_size,
    const MaybeNumber& softcap,
    const MaybeArray& sinks,
    bool return_lse,
    const mx::Stream& stream) {
  const PagedArguments in{q, k_pages, v_pages, block_table, lengths, scale, window_size, softcap, sinks, return_lse};
  if (const auto call = in.call()) {
    paged_calls.remember(in.key(*call, stream));
  }
}

nb::object paged_again(
    const mx::array& q,
    const mx::array& k_pages,
    const mx::array& v_pages,
    const mx::array& block_table,
    const mx::array& lengths,
    const MaybeNumber& scale,
    nb::handle window_size,
    const MaybeNumber& softcap,
    const MaybeArray& sinks,
    bool return_lse,
    const StreamOrDevice& stream) {
  const PagedArguments in{q, k_pages, v_pages, block_table, lengths, scale, window_size, softcap, sinks, return_lse};
  const auto call = in.call();
  const mx::Stream on = stream_of(stream);
  if (!call || !paged_calls.holds(in.key(*call, on))) {
    return nb::none();
  }
  return returned(decode_attention(q, k_pages, v_pages, call->extras, call->options, return_lse, on, block_table), return_lse);
}

// The arguments of `attention_varlen` in python/mlx_cuda/_attention/varlen.py, but for force_fused: only calls of the flash kernel are kept.
struct VarlenArguments {
  const mx::array& q;
  const mx::array& k;
  const mx::array& v;
  const mx::array& cu_q;
  const mx::array& cu_k;
  nb::handle max_q;
  nb::handle max_k;
  const MaybeNumber& scale;
  const Mask& mask;
  nb::handle window_size;
  const MaybeNumber& softcap;
  const MaybeArray& sinks;
  bool return_lse;

  int most_queries() const {
    return count_from(max_q).value_or(-1);
  }

  int most_keys() const {
    return count_from(max_k).value_or(-1);
  }

  std::optional<Call> call() const {
    auto rows = [](const mx::array& in) { return in.ndim() == 3 && in.size() > 0; };
    // What is differentiated or vectorised goes through padded sequences.
    auto traced = [](const mx::array& in) { return in.is_tracer(); };
    const bool packed = rows(q) && rows(k) && rows(v) && same_dtype(q, k, v) && same_sizes(q, k, {2}) && same_sizes(k, v, {0, 1});
    const bool placed =
        cu_q.ndim() == 1 && cu_q.size() > 1 && cu_q.dtype() == mx::int32 && is_vector(cu_k, cu_q.shape(0), mx::int32);
    if (!packed || !placed || most_queries() < 1 || most_keys() < 1 || std::holds_alternative<mx::array>(mask) || traced(q) ||
        traced(k) || traced(v) || traced(cu_q) || traced(cu_k) || (sinks && traced(*sinks))) {
      return std::nullopt;
    }
    Call call{.extras = {.sinks = sinks}, .lse = return_lse};
    if (!is_vector(sinks, q.shape(1), q.dtype()) || !read_numbers(call, scale, softcap, q.shape(2)) ||
        !read_window(call, window_size, most_keys()) || !read_mask(call, mask, {}, q.dtype())) {
      return std::nullopt;
    }
    return call;
  }

  // Of the number of rows nothing depends but that there are some.
  Key key(const Call& call, const mx::Stream& stream) const {
    return key_of(call, q.dtype(), {q.shape(1), q.shape(2), k.shape(1), v.shape(2), cu_q.shape(0), most_queries()}, stream);
  }
};

void remember_varlen(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    const mx::array& cu_q,
    const mx::array& cu_k,
    nb::handle max_q,
    nb::handle max_k,
    const MaybeNumber& scale,
    const Mask& mask,
    nb::handle window_size,
    const MaybeNumber& softcap,
    const MaybeArray& sinks,
    bool return_lse,
    const mx::Stream& stream) {
  const VarlenArguments in{q, k, v, cu_q, cu_k, max_q, max_k, scale, mask, window_size, softcap, sinks, return_lse};
  if (const auto call = in.call()) {
    varlen_calls.remember(in.key(*call, stream));
  }
}

nb::object varlen_again(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    const mx::array& cu_q,
    const mx::array& cu_k,
    nb::handle max_q,
    nb::handle max_k,
    const MaybeNumber& scale,
    const Mask& mask,
    nb::handle window_size,
    const MaybeNumber& softcap,
    const MaybeArray& sinks,
    bool return_lse,
    const StreamOrDevice& stream) {
  const VarlenArguments in{q, k, v, cu_q, cu_k, max_q, max_k, scale, mask, window_size, softcap, sinks, return_lse};
  const auto call = in.call();
  const mx::Stream on = stream_of(stream);
  if (!call || !varlen_calls.holds(in.key(*call, on))) {
    return nb::none();
  }
  auto results = flash_varlen(q, k, v, cu_q, cu_k, sinks, in.most_queries(), in.most_keys(), call->options, return_lse, on);
  // The kernel writes no rows behind the last sequence.
  const int sequences = cu_q.shape(0) - 1;
  const mx::array end = mx::slice(cu_q, {sequences}, {sequences + 1}, on);
  const mx::array inside = mx::less(mx::arange(q.shape(0), mx::int32, on), end, on);
  const mx::array zero(0.0f, q.dtype());
  results[0] = mx::where(mx::reshape(inside, {q.shape(0), 1, 1}, on), results[0], zero, on);
  if (return_lse) {
    results[1] = mx::where(inside, results[1], mx::array(-std::numeric_limits<float>::infinity()), on);
  }
  return returned(results, return_lse);
}

}  // namespace

void bind_remembered_layouts(nb::module_& m) {
  m.def(
      "remember_paged", &remember_paged, "q"_a, "k_pages"_a, "v_pages"_a, "block_table"_a, "lengths"_a, "scale"_a.none(),
      "window_size"_a.none(), "softcap"_a.none(), "sinks"_a.none(), "return_lse"_a, "stream"_a);
  m.def(
      "paged_again", &paged_again, "q"_a, "k_pages"_a, "v_pages"_a, "block_table"_a, "lengths"_a, "scale"_a.none(),
      "window_size"_a.none(), "softcap"_a.none(), "sinks"_a.none(), "return_lse"_a, "stream"_a.none());
  m.def(
      "remember_varlen", &remember_varlen, "q"_a, "k"_a, "v"_a, "cu_q"_a, "cu_k"_a, "max_q"_a, "max_k"_a, "scale"_a.none(),
      "mask"_a.none(), "window_size"_a.none(), "softcap"_a.none(), "sinks"_a.none(), "return_lse"_a, "stream"_a);
  m.def(
      "varlen_again", &varlen_again, "q"_a, "k"_a, "v"_a, "cu_q"_a, "cu_k"_a, "max_q"_a, "max_k"_a, "scale"_a.none(),
      "mask"_a.none(), "window_size"_a.none(), "softcap"_a.none(), "sinks"_a.none(), "return_lse"_a, "stream"_a.none());
}

}  // namespace mlx_cuda
