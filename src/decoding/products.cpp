#include "decoding/products.h"

#include "decoding/edges.h"
#include "matmul/quantized/quantized.h"
#include "runtime/device_code.h"
#include "runtime/memory.h"
#include "runtime/node.h"

#include <mlx/primitives.h>

#include <algorithm>
#include <bit>
#include <string>
#include <utility>

namespace mlx_cuda {

namespace {

bool is_half(mx::Dtype dtype) {
  return dtype == mx::float16 || dtype == mx::bfloat16;
}

int bits_of(const RowProductOf& product) {
  return product.form ? product.form->bits : 16;
}

std::optional<RowProductOf> quantized(const mx::array& out) {
  std::optional<QuantizedWeights> weights = row_weights(out);
  if (!weights || !weights->biases || weights->mode != "affine" || (weights->bits != 4 && weights->bits != 8) || weights->w.ndim() != 2 ||
      weights->scales.dtype() != out.dtype()) {
    return std::nullopt;
  }
  for (const mx::array& array : {weights->w, weights->scales, *weights->biases}) {
    if (!array.data_shared_ptr() || !array.flags().row_contiguous) {
      return std::nullopt;
    }
  }
  return RowProductOf{
      out.inputs()[0], out, weights->w, QuantizedForm(*weights), weights->scales, weights->biases, weights->w.shape(0), weights->inner()};
}

// MLX's layers multiply by the transposed view of their weights.
std::optional<RowProductOf> dense(const mx::array& out) {
  const mx::array& w = out.inputs()[1];
  if (w.ndim() != 2 || !w.data_shared_ptr() || w.strides(0) != 1 || w.strides(1) != w.shape(0)) {
    return std::nullopt;
  }
  return RowProductOf{out.inputs()[0], out, w, {}, {}, {}, w.shape(1), w.shape(0)};
}

// Which of the kernels takes a call: how many tiles each warp has. Two share what is done for x.
int tiles_of(const RowProducts& call, int tiles) {
  constexpr int kMany = 1024;
  return call.epilogue == RowEpilogue::swiglu || tiles >= kMany ? 2 : 1;
}

void launch(const RowProducts& call, const mx::Stream& stream) {
  auto& encoder = mx::cu::get_command_encoder(stream);
  const RowProductOf& first = call.parts[0];
  const int bits = bits_of(first);
  RowProductParams params{};
  params.inner = first.inner;
  params.rows = static_cast<int>(call.x.size() / first.inner);
  params.eps = call.eps;
  params.epilogue = call.epilogue;
  params.parts = static_cast<int>(call.parts.size());
  if (first.form) {
    params.groups = first.inner / first.form->group_size;
    params.group_shift = std::countr_zero(static_cast<unsigned>(first.form->group_size));
  }
  const mx::array x = contiguous(call.x, encoder, stream);
  const auto added = call.added ? std::optional(contiguous(*call.added, encoder, stream)) : std::nullopt;
  std::vector<mx::array> outputs = call.outputs;
  for (mx::array& out : outputs) {
    allocate(out, stream);
  }

  KernelNode node(encoder);
  params.x = node.reads(x);
  params.norm = node.reads(call.norm);
  params.added = node.reads(added);
  for (std::size_t i = 0; i < call.parts.size(); ++i) {
    const RowProductOf& from = call.parts[i];
    RowPart& part = params.part[i];
    part.w = node.reads(from.w);
    part.scales = node.reads(from.scales);
    part.biases = node.reads(from.biases);
    part.columns = from.columns;
    part.first_tile = params.tiles;
    params.tiles += ceil_div(from.columns, RowProductParams::kTileRows);
  }
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    params.part[i].out = node.writes(outputs[i]);
  }
  const int tiles = tiles_of(call, params.tiles);
  const int steps = ceil_div(first.inner, 4 * RowProductParams::values(bits));
  const int warps = std::clamp(ceil_div(steps, RowProductParams::ahead(bits, tiles)), 1, RowProductParams::kMostWarps);
  const std::string format = bits == 16 ? "plain" : "affine" + std::to_string(bits);
  static KernelModule kernels("product");
  CUfunction kernel = kernels.function("row_product_" + format + "_" + type_name(x.dtype()) + "_" + std::to_string(tiles));
  waits_itself(kernel);
  node.launch(kernel, dim3(ceil_div(params.tiles, tiles)), 32 * warps, 0, params);
}

}  // namespace

std::optional<RowProductOf> row_product(const Item& item) {
  const mx::array& out = item.outputs[0];
  auto found = item.name == "Matmul" ? dense(out) : quantized(out);
  if (!found || !is_half(out.dtype()) || found->x.dtype() != out.dtype()) {
    return std::nullopt;
  }
  const auto rows = static_cast<int>(out.size() / found->columns);
  const bool fits = found->inner % (128 / bits_of(*found)) == 0 && is_aligned(found->w, 0, 16) &&
                    static_cast<std::int64_t>(found->x.size()) == std::int64_t{rows} * found->inner;
  return fits && rows <= RowProductParams::kMostRows ? found : std::nullopt;
}

Item RowProducts::item() const {
  std::vector<mx::array> inputs{x};
  if (added) {
    inputs.push_back(*added);
  }
  const std::string before = norm ? "norm + " : "";
  const std::string after = epilogue == RowEpilogue::add ? " + add" : epilogue == RowEpilogue::swiglu ? " + swiglu" : "";
  const std::string count = parts.size() == 1 ? "product" : std::to_string(parts.size()) + " products";
  return {before + count + after, inputs, outputs, [call = *this](const mx::Stream& stream) { launch(call, stream); }};
}

}  // namespace mlx_cuda
