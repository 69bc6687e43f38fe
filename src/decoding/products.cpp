#include "decoding/products.h"

#include "matmul/quantized/quantized.h"
#include "runtime/device_code.h"
#include "runtime/early.h"
#include "runtime/memory.h"
#include "runtime/node.h"

#include <mlx/primitives.h>

#include <algorithm>
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
  if (!weights || !weights->biases || weights->mode != "affine" || (weights->bits != 4 && weights->bits != 8) ||
      weights->w.ndim() != 2 || weights->scales.dtype() != out.dtype()) {
    return std::nullopt;
  }
  for (const mx::array& array : {weights->w, weights->scales, *weights->biases}) {
    if (!array.data_shared_ptr() || !array.flags().row_contiguous) {
      return std::nullopt;
    }
  }
  return RowProductOf{
      out.inputs()[0], out, weights->w, QuantizedForm(*weights), weights->scales, weights->biases, weights->w.shape(0),
      weights->inner()};
}

// MLX's layers multiply by the transposed view of their weights.
std::optional<RowProductOf> dense(const mx::array& out) {
  const mx::array& w = out.inputs()[1];
  if (w.ndim() != 2 || !w.data_shared_ptr() || w.strides(0) != 1 || w.strides(1) != w.shape(0)) {
    return std::nullopt;
  }
  return RowProductOf{out.inputs()[0], out, w, {}, {}, {}, w.shape(1), w.shape(0)};
}

// How many tiles a block has, and how many warps each of them: all that the device holds at once, as far as possible, so that all
// of w is asked for before x is waited for.
void share_out(RowProductParams& params, int steps, int& warps) {
  constexpr int held = RowProductParams::kMostWarps * RowProductParams::kBlocks;  // of a multiprocessor
  const int each = ceil_div(params.tiles, multiprocessors());
  params.block_tiles = params.epilogue == RowEpilogue::swiglu || each > 4 ? 2 : 1;
  const int blocks = ceil_div(each, params.block_tiles);
  const int tile_warps = std::clamp(held / blocks / params.block_tiles, 2, RowProductParams::kMostWarps / params.block_tiles);
  params.warp_steps = steps / tile_warps;
  params.longer_warps = steps % tile_warps;
  warps = tile_warps * params.block_tiles;
}

// How many scales a step of values has.
int units_of(const RowProductOf& product) {
  return product.form ? std::max(RowProductParams::step(product.form->bits) / product.form->group_size, 1) : 1;
}

// Whether the kernel takes such rows of x and w.
bool fits(const RowProductOf& product, int rows) {
  const int bits = bits_of(product);
  const int step = RowProductParams::step(bits);
  const int units = units_of(product);
  if (units > 1 && product.inner / product.form->group_size % 2 != 0) {
    return false;
  }
  const bool aligned = product.inner % step == 0 && is_aligned(product.w, 0, 16) &&
                       (!product.form || (is_aligned(*product.scales, 0, 4) && is_aligned(*product.biases, 0, 4)));
  RowProductParams largest{};
  largest.rows = rows;
  largest.inner = product.inner;
  const bool small = product.w.nbytes() < (std::size_t{1} << 32);
  return compute_capability() >= 80 && aligned && small && rows * units <= RowProductParams::kColumns &&
         largest.shared_bytes(bits, units, RowProductParams::kMostWarps) <= shared_memory_limit() / 2;
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
    params.scale_shift = first.form->group_size > RowProductParams::step(bits);
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
  int warps = 0;
  share_out(params, first.inner / RowProductParams::step(bits), warps);
  const std::string format = bits == 16 ? "plain" : "affine" + std::to_string(bits);
  static KernelModule kernels("product");
  CUfunction kernel =
      kernels.function("row_product_" + format + "_" + type_name(x.dtype()) + "_" + std::to_string(units_of(first)));
  begins_early(kernel);
  node.launch(
      kernel, dim3(ceil_div(params.tiles, params.block_tiles)), 32 * warps, params.shared_bytes(bits, units_of(first), warps),
      params);
}

}  // namespace

std::optional<RowProductOf> row_product(const Item& item) {
  const mx::array& out = item.outputs[0];
  auto found = item.name == "Matmul" ? dense(out) : quantized(out);
  if (!found || !is_half(out.dtype()) || found->x.dtype() != out.dtype()) {
    return std::nullopt;
  }
  const auto rows = static_cast<int>(out.size() / found->columns);
  return static_cast<std::int64_t>(found->x.size()) == std::int64_t{rows} * found->inner && fits(*found, rows) ? found
                                                                                                               : std::nullopt;
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
