#include "attention/composed.h"

#include <mlx/ops.h>

#include <limits>

namespace mlx_cuda {

Arrays composed_attention(const AttentionArrays& in, const AttentionOptions& options, const mx::Stream& on) {
  auto wide = [&](const mx::array& of) { return mx::astype(of, mx::float32, on); };
  const auto& [q, key_heads, value_heads, table, mask, starts, ends, sinks] = in;
  const int batch = q.shape(0);
  const int heads = q.shape(1);
  const int queries = q.shape(2);
  const int groups = heads / key_heads.shape(1);
  const int keys = key_heads.shape(2);
  const mx::array key = mx::reshape(mx::arange(keys, mx::int32, on), {1, 1, 1, keys}, on);
  auto column = [&](const mx::array& of) { return mx::reshape(of, {batch, 1, 1, 1}, on); };
  const mx::array end = ends ? column(*ends) : mx::array(keys);
  const mx::array query = mx::reshape(mx::arange(queries, mx::int32, on), {1, 1, queries, 1}, on);
  const mx::array diagonal = mx::subtract(mx::add(query, end, on), mx::array(queries), on);
  mx::array seen = mx::less(key, end, on);
  auto also = [&](const mx::array& condition) { seen = mx::logical_and(seen, condition, on); };
  if (starts) {
    also(mx::greater_equal(key, column(*starts), on));
  }
  // Memory beyond the keys may hold anything, even NaN, and 0 * NaN is NaN.
  const mx::array there = mx::swapaxes(seen, 2, 3, on);
  auto per_head = [&](const mx::array& of) {
    const mx::array present = starts || ends ? mx::where(there, of, mx::array(0.0f, of.dtype()), on) : of;
    return mx::repeat(wide(present), groups, 1, on);
  };
  const mx::array k = per_head(key_heads);
  const mx::array v = per_head(value_heads);
  mx::array scores = mx::matmul(mx::multiply(wide(q), mx::array(options.scale), on), mx::swapaxes(k, 2, 3, on), on);
  if (options.softcap > 0) {
    const mx::array cap(options.softcap);
    scores = mx::multiply(cap, mx::tanh(mx::divide(scores, cap, on), on), on);
  }
  if (options.window_left >= 0) {
    also(mx::greater_equal(key, mx::subtract(diagonal, mx::array(options.window_left), on), on));
  }
  if (options.window_right >= 0) {
    also(mx::less_equal(key, mx::add(diagonal, mx::array(options.window_right), on), on));
  }
  const mx::array infinity(std::numeric_limits<float>::infinity());
  const mx::array lowest(std::numeric_limits<float>::lowest());
  mx::array shift(0.0f);
  if (mask && mask->dtype() == mx::bool_) {
    also(*mask);
  } else if (mask) {
    // Large numbers in all of a row would swallow the scores. A common offset does not change the weights, so it is subtracted.
    const mx::array bias = mx::where(seen, wide(*mask), mx::negative(infinity, on), on);
    const mx::array top = mx::stop_gradient(mx::max(bias, 3, true, on), on);
    const mx::array large = mx::greater(mx::abs(top, on), mx::array(1024.0f), on);
    shift = sinks ? shift : mx::where(large, mx::maximum(top, lowest, on), shift, on);
    scores = mx::add(scores, mx::subtract(bias, shift, on), on);
    seen = mx::not_equal(bias, mx::negative(infinity, on), on);  // NaN is never masked
  }
  // Hidden scores are made finite before anything is computed with them, so that neither the result nor a gradient is NaN.
  scores = mx::where(seen, scores, lowest, on);
  mx::array peak = mx::max(scores, 3, true, on);
  if (sinks) {
    peak = mx::maximum(peak, mx::reshape(wide(*sinks), {1, heads, 1, 1}, on), on);
  }
  peak = mx::stop_gradient(peak, on);
  const mx::array weights = mx::where(seen, mx::exp(mx::subtract(scores, peak, on), on), mx::array(0.0f), on);
  mx::array total = mx::sum(weights, 3, true, on);
  if (sinks) {
    total = mx::add(total, mx::exp(mx::subtract(mx::reshape(wide(*sinks), {1, heads, 1, 1}, on), peak, on), on), on);
  }
  const mx::array none = mx::equal(total, mx::array(0.0f), on);
  const mx::array sum = mx::where(none, mx::array(1.0f), total, on);
  const mx::array out = mx::astype(mx::divide(mx::matmul(weights, v, on), sum, on), q.dtype(), on);
  if (!options.lse) {
    return {out};
  }
  const mx::array lse = mx::where(none, mx::negative(infinity, on), mx::add(mx::add(peak, mx::log(sum, on), on), shift, on), on);
  return {out, mx::squeeze(lse, 3, on)};
}

mx::array pages_in_order(const mx::array& pages, const mx::array& table, const mx::array& ends, const mx::Stream& on) {
  const int batch = table.shape(0);
  const int keys = table.shape(1) * pages.shape(2);
  const mx::array page = mx::clip(table, mx::array(0), mx::array(pages.shape(0) - 1), on);
  mx::array all = mx::transpose(mx::take(pages, page, 0, on), {0, 2, 1, 3, 4}, on);
  all = mx::reshape(all, {batch, pages.shape(1), keys, pages.shape(3)}, on);
  const mx::array place = mx::reshape(mx::arange(keys, mx::int32, on), {1, 1, keys, 1}, on);
  const mx::array there = mx::less(place, mx::reshape(ends, {batch, 1, 1, 1}, on), on);
  return mx::where(there, all, mx::array(0.0f, all.dtype()), on);
}

}  // namespace mlx_cuda
