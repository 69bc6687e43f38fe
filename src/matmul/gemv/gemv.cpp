#include "matmul/gemv/gemv.h"

#include "matmul/gemv/kernels.h"
#include "matmul/grouped/primitive.h"
#include "matmul/quantized/quantized.h"
#include "runtime/device_code.h"
#include "runtime/kernel_table.h"
#include "runtime/memory.h"
#include "runtime/node.h"
#include "runtime/pdl.h"

#include <mlx/primitives.h>

#include <algorithm>
#include <bit>
#include <string_view>
#include <utility>

namespace mlx_cuda {

namespace {

// For so many rows of x.
GemvForm gemv_form(const OneGemv& gemv, int rows) {
  if (!gemv.form) {
    return {};
  }
  const auto& [group_size, bits, mode] = *gemv.form;
  GemvForm form{bits, std::countr_zero(static_cast<unsigned>(group_size)), mode != "affine"};
  form.many = form.integers() && bits == 4 && rows > form.most_rows() && is_hopper();
  return form;
}

bool adjacent(const mx::array& array) {
  return array.data_shared_ptr() && array.flags().row_contiguous;
}

std::optional<OneGemv> quantized(const mx::array& out) {
  const std::optional<RowWeights> found = row_weights(out);
  const auto* weights = found ? &found->weights : nullptr;
  if (!weights || weights->w.ndim() != (found->chosen ? 3 : 2) || (weights->biases && weights->scales.dtype() != out.dtype()) ||
      !adjacent(weights->w) || !adjacent(weights->scales) || (weights->biases && !adjacent(*weights->biases))) {
    return std::nullopt;
  }
  return OneGemv{
      out.inputs()[0],  out,          weights->w, QuantizedForm(*weights), weights->scales, weights->biases, weights->w.shape(-2),
      weights->inner(), found->chosen};
}

// MLX's layers multiply by the transposed view of their weights.
std::optional<OneGemv> dense(const mx::array& out) {
  const mx::array& w = out.inputs()[1];
  if (w.ndim() != 2 || !w.data_shared_ptr() || w.strides(0) != 1 || w.strides(1) != w.shape(0)) {
    return std::nullopt;
  }
  return OneGemv{out.inputs()[0], out, w, {}, {}, {}, w.shape(1), w.shape(0)};
}

std::optional<OneGemv> dense_of_experts(const mx::array& out) {
  const auto found = gathered_rows(out);
  if (!found) {
    return std::nullopt;
  }
  const mx::array& w = found->w;
  const int inner = found->transpose ? 2 : 1;  // axis
  const int columns = 3 - inner;
  if (!w.data_shared_ptr() || w.strides(inner) != 1 || w.strides(columns) != w.shape(inner) ||
      w.strides(0) != std::int64_t{w.shape(1)} * w.shape(2)) {
    return std::nullopt;
  }
  return OneGemv{out.inputs()[0], out, w, {}, {}, {}, w.shape(columns), w.shape(inner), found->chosen};
}

// Two blocks per SM, with a little shared memory reserved for each: this GEMV's and the next one's.
int memory_of_two() {
  return (shared_memory_limit() - 1024) / 2;
}

// The most tiles of a block: halves of tiles are of one part.
int tiles_of(const GemvParams& params) {
  constexpr int half = GemvParams::kHalfRows;
  if (is_gated(params.epilogue) || params.parts < 2) {
    return ceil_div(params.block_rows, is_gated(params.epilogue) ? half : 2 * half);
  }
  int most = 0;
  for (int begin = 0; begin < params.row_limit; begin += params.block_rows) {
    int halves = 0;
    for (int i = 0; i < params.parts; ++i) {
      const GemvPart& part = params.part[i];
      const int end = std::min(begin + params.block_rows, part.first + part.columns);
      halves += ceil_div(std::max(end - std::max(begin, part.first), 0), half);
    }
    most = std::max(most, halves);
  }
  return ceil_div(most, 2);
}

// Divides the rows of w among blocks of so many warps: two for each multiprocessor, so that one reads while the other begins or
// ends, and more where they would take too much memory.
bool divide(GemvParams& params, const GemvForm& form, int warps, int memory) {
  for (int each = 2;; ++each) {
    params.block_rows = ceil_div(params.row_limit, multiprocessors() * each);
    if (params.experts && params.turns == 1) {  // halves of tiles are of one expert
      params.block_rows = ceil_div(params.block_rows, GemvParams::kHalfRows) * GemvParams::kHalfRows;
    }
    params.tiles = tiles_of(params);
    const bool small = params.sums_bytes() <= GemvParams::kMostSums && params.scales_bytes(form) <= GemvParams::kMostScales;
    if (params.shared_bytes(form, warps) <= memory && (small || params.tiles == 1)) {
      return true;
    }
    if (params.tiles == 1) {
      return false;
    }
  }
}

// The same for more rows of x, which take much memory: two blocks on a multiprocessor, or one, or clusters of two that have half of
// inner each. Where these have too little memory too, fewer rows of w for each block, in up to so many waves.
int share_out_many(GemvParams& params, const GemvForm& form, int most_waves) {
  const int units = params.turn_units(form);
  const int multiple = ceil_div(8, form.scale_bytes(form.unit_values()));  // whose scales can be copied
  for (int waves = 1; waves <= most_waves; ++waves) {
    for (int splits = 1; splits <= GemvParams::kMostSplits; ++splits) {
      params.splits = splits;
      params.split_units = ceil_div(ceil_div(units, splits), multiple) * multiple;
      if ((splits - 1) * params.split_units >= units) {
        break;
      }
      for (const auto& [memory, blocks] : {std::pair(memory_of_two(), 2), std::pair(shared_memory_limit(), 1)}) {
        params.block_rows = ceil_div(params.row_limit, multiprocessors() * blocks / splits * waves);
        params.tiles = tiles_of(params);
        for (int warps = GemvParams::kMostWarps; warps >= 2 * GemvParams::kLeastWarps; warps -= GemvParams::kLeastWarps) {
          if (params.shared_bytes(form, warps) <= memory) {
            return warps;
          }
        }
      }
    }
  }
  return 0;
}

// How many warps a block has; none where its multiprocessor has too little memory. If possible there is room for two blocks.
int share_out(GemvParams& params, const GemvForm& form) {
  constexpr int most = GemvParams::kMostWarps;
  constexpr int least = GemvParams::kLeastWarps;
  if (form.many) {
    return share_out_many(params, form, params.row_limit);
  }
  for (const auto& [memory, fewest] : {std::pair(memory_of_two(), 2 * least), std::pair(shared_memory_limit(), least)}) {
    for (int warps = most; warps >= fewest; warps -= least) {
      if (divide(params, form, warps, memory)) {
        return warps;
      }
    }
  }
  return 0;
}

// Whether the kernel takes such rows of x and w.
bool fits(const OneGemv& gemv, int rows) {
  const GemvForm form = gemv_form(gemv, rows);
  if (compute_capability() < 80 || rows > form.most_rows() || gemv.inner % 32 != 0 || gemv.inner / 8 * form.bits % 16 != 0 ||
      !is_aligned(gemv.w, 0, 16) || gemv.count() > GemvParams::kMostChosen ||
      (gemv.chosen && (gemv.columns % GemvParams::kHalfRows != 0 || gemv.chosen->dtype() != mx::uint32))) {
    return false;
  }
  if (form.packed()) {
    const int bytes = form.scale_bytes(gemv.inner);
    const int together = bytes % 8 == 0 ? 8 : 4;  // that are copied at once
    if (bytes % 4 != 0 || !is_aligned(*gemv.scales, 0, together) || (gemv.biases && !is_aligned(*gemv.biases, 0, together))) {
      return false;
    }
  }
  GemvParams least{};
  least.rows = rows;
  least.inner = gemv.inner;
  least.turns = gemv.each_its_row() ? gemv.count() : 1;
  if (form.many) {  // in one wave, as in a second one x is made ready again; of two, which may be gated
    least.row_limit = 2 * gemv.columns;
    return share_out_many(least, form, 1) != 0;
  }
  least.row_limit = 1;
  return share_out(least, form) != 0;
}

using Row = KernelRow<std::string_view, int, int>;
#define MLX_CUDA_PLAIN_ROW(name, dtype) {#name, {#dtype, 16, 0}},
constexpr auto kKernels = std::to_array<Row>({MLX_CUDA_GEMV_KERNELS(MLX_CUDA_PLAIN_ROW, MLX_CUDA_KERNEL_ROW)});
constexpr auto kUnpackedKernels =
    std::to_array<KernelRow<std::string_view, std::string_view>>({MLX_CUDA_GEMV_UNPACKED_KERNELS(MLX_CUDA_FORMAT_ROW)});
constexpr auto kManyKernels = std::to_array<KernelRow<std::string_view>>({MLX_CUDA_GEMV_MANY_KERNELS(MLX_CUDA_KERNEL_ROW)});

CUfunction kernel_of(const OneGemv& gemv, const GemvForm& form, const std::string& dtype) {
  static KernelModule kernels("gemv");
  static KernelModule moe("gemv_moe");
  static KernelModule unpacked("gemv_unpacked");
  static KernelModule many("gemv_many_sm90");
  if (form.many) {
    return many.function(kernel_for(kManyKernels, dtype));
  }
  if (form.packed() && !form.integers()) {
    return unpacked.function(kernel_for(kUnpackedKernels, dtype, format_name(*gemv.form)));
  }
  const int group = form.packed() ? gemv.form->group_size : 0;
  return (gemv.chosen ? moe : kernels).function(kernel_for(kKernels, dtype, form.bits, group));
}

}  // namespace

void launch(const GemvCall& call, const mx::Stream& stream) {
  auto& encoder = mx::cu::get_command_encoder(stream);
  const OneGemv& first = call.parts[0];
  GemvParams params{};
  params.inner = first.inner;
  params.rows = first.chosen ? 1 : static_cast<int>(call.x.size() / first.inner);
  const GemvForm form = gemv_form(first, params.rows);
  params.eps = call.eps;
  params.epilogue = call.epilogue;
  params.parts = static_cast<int>(call.parts.size());
  params.group_shift = form.group_shift;
  const mx::array x = contiguous_on_16_bytes(call.x, encoder, stream);
  const auto added = call.added ? std::optional(contiguous(*call.added, encoder, stream)) : std::nullopt;
  const auto chosen = first.chosen ? std::optional(contiguous(*first.chosen, encoder, stream)) : std::nullopt;
  const auto factors = call.factors ? std::optional(contiguous(*call.factors, encoder, stream)) : std::nullopt;
  Arrays outputs = call.outputs;
  for (mx::array& out : outputs) {
    allocate(out, stream);
  }

  KernelNode node(encoder);
  params.x = node.reads(x);
  params.norm = node.reads(call.norm);
  params.added = node.reads(added);
  params.experts = node.reads<unsigned>(chosen);
  params.factors = node.reads(factors);
  params.chosen = first.count();
  params.expert_rows = first.columns;
  params.turns = first.each_its_row() ? params.chosen : 1;
  const int repeated = params.turns == 1 ? params.chosen : 1;  // rows of the result, of each part
  for (std::size_t i = 0; i < call.parts.size(); ++i) {
    const OneGemv& from = call.parts[i];
    GemvPart& part = params.part[i];
    part.w = node.reads(from.w);
    part.scales = node.reads(from.scales);
    part.biases = node.reads(from.biases);
    part.columns = repeated * from.columns;
    part.first = params.row_limit;
    params.row_limit += part.columns;
  }
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    params.part[i].out = node.writes(outputs[i]);
  }
  if (is_gated(call.epilogue)) {
    params.row_limit = params.part[0].columns;
  }
  const int warps = share_out(params, form);
  CUfunction kernel = with_pdl(kernel_of(first, form, type_name(x.dtype())));
  const int blocks = ceil_div(params.row_limit, params.block_rows) * params.splits;
  node.launch_in_clusters(params.splits, kernel, dim3(blocks), 32 * warps, params.shared_bytes(form, warps), params);
}

std::optional<OneGemv> gemv_of(const mx::array& out) {
  const std::string_view name = out.primitive().name();
  auto found = name == "Matmul" ? dense(out) : name == "QuantizedSmallM" ? quantized(out) : dense_of_experts(out);
  if (!found || !is_half(out.dtype()) || found->x.dtype() != out.dtype()) {
    return std::nullopt;
  }
  if (found->chosen) {
    const auto values = static_cast<int>(found->x.size());
    return (values == found->inner || values == found->count() * found->inner) && fits(*found, 1) ? found : std::nullopt;
  }
  const auto rows = static_cast<int>(out.size() / found->columns);
  return static_cast<std::int64_t>(found->x.size()) == std::int64_t{rows} * found->inner && fits(*found, rows) ? found
                                                                                                               : std::nullopt;
}

Arrays GemvCall::inputs() const {
  Arrays all{x};
  for (const auto& optional : {added, factors, parts[0].chosen}) {
    if (optional) {
      all.push_back(*optional);
    }
  }
  return all;
}

std::string GemvCall::name() const {
  const std::string before = norm ? "norm + " : "";
  constexpr const char* kAfter[] = {"", " + add", " + swiglu", " + geglu", " + geglu_tanh"};
  const std::string count = parts.size() == 1 ? "" : std::to_string(parts.size()) + " ";
  const std::string gemv = std::string(parts[0].chosen ? "MoE GEMV" : "GEMV") + (parts.size() == 1 ? "" : "s");
  return before + count + gemv + (factors ? " + sum" : "") + kAfter[static_cast<int>(epilogue)];
}

}  // namespace mlx_cuda
