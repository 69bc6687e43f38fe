#include "matmul/quantized/moe.h"

#include "matmul/quantized/moe_params.h"
#include "runtime/device_code.h"
#include "runtime/lanes.h"
#include "runtime/memory.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

namespace mlx_cuda {

namespace {

KernelModule& kernels() {
  static KernelModule module("quantized_moe_sm90");
  return module;
}

// Measured on an H200 with 8 experts for each of 1, 2, 4 and 8 tokens, of 64 and 128 experts of 2048 x 2048, 768 x 2048, 2048 x
// 768, 1536 x 4096 and 4096 x 1536, as a kernel alone and with three others.
constexpr int kLeastInner = 768;
constexpr int kMostInner = 4096;
constexpr int kFullInner = 2048;   // from which on there have to be as many tiles as blocks
constexpr int kShared = 32 << 10;  // bytes of a block: with more, what is left of the first cache is too small for the scales
constexpr int kTogether = 4;       // pairs of one expert
constexpr double kShared4 = 0.92;  // experts that are different, of the pairs: with more, finding the others costs what it saves
constexpr double kShared8 = 0.75;  // likewise of 8 bits, where quantized_skinny.cu reads as fast
constexpr int kFewestShared = 9;   // pairs: the experts of one token are different

// Whether the scales of a slice lie on as many bytes as they are.
bool scales_are_wide(const Readable& in) {
  const mx::array& scales = in.weights.scales;
  const auto bytes = PairsParams::kSlice / in.weights.group_size * static_cast<int>(scales.itemsize());
  const auto aligned = [&](const mx::array& array) { return array.offset() % bytes == 0; };
  return in.scale_distance % bytes == 0 && aligned(scales) && (!in.weights.biases || aligned(*in.weights.biases));
}

int tiles_of(const Readable& in) {
  return in.weights.w.shape(-2) / PairsParams::kTileRows;
}

int experts_of(const Readable& in) {
  const mx::array& w = in.weights.w;
  return static_cast<int>(w.size() / w.shape(-1) / w.shape(-2));
}

// How many of the pairs are the first that name their expert, if experts are named at random: a fraction.
double different(int pairs, int experts) {
  return experts * (1.0 - std::pow(1.0 - 1.0 / experts, pairs)) / pairs;
}

// Than quantized_skinny.cu, whose newer way with 3, 5 and 6 bits this kernel has not been measured against.
bool is_faster(const Readable& in, int pairs) {
  const int bits = in.weights.bits;
  return bits == 2 || bits == 4 || (bits == 8 && different(pairs, experts_of(in)) < kShared8);
}

}  // namespace

bool quantized_pairs_takes(const Readable& in, int pairs) {
  const int inner = in.weights.inner();
  const std::int64_t items = static_cast<std::int64_t>(pairs) * tiles_of(in);
  const int fewest = multiprocessors() * (inner > kFullInner ? PairsParams::kBlocks : 1);
  const int most = std::numeric_limits<int>::max() / PairsParams::kTileRows;  // the kernel counts results by an int
  return pairs <= PairsParams::kMost && items <= most && inner % PairsParams::kSlice == 0 && inner >= kLeastInner &&
         inner <= kMostInner && in.weights.w.shape(-2) % PairsParams::kTileRows == 0 && items >= fewest && is_faster(in, pairs) &&
         scales_are_wide(in) && is_hopper();
}

void encode_quantized_pairs(
    const mx::array& x,
    const Readable& in,
    const std::optional<mx::array>& lhs_indices,
    const mx::array& rhs_indices,
    mx::array& out,
    mx::cu::CommandEncoder& encoder) {
  const mx::array& scales = in.weights.scales;
  PairsParams params{};
  set_weights(params, in);
  params.x_distance = *row_distance(x);
  params.row_bytes = in.row_bytes;
  params.inner = x.shape(-1);
  params.matrices = static_cast<int>(x.size() / params.inner);
  params.experts = experts_of(in);
  params.columns = out.shape(-1);
  params.row_scales = scales.shape(-1) * static_cast<int>(scales.itemsize());
  params.pairs = static_cast<int>(out.size() / params.columns);

  const int slices = params.inner / PairsParams::kSlice;
  const int warps = divide_up(slices, divide_up(slices, PairsParams::kMostWarps));
  params.together = 1;
  if (params.pairs >= kFewestShared && different(params.pairs, params.experts) < kShared4) {
    params.together = kTogether;
    while (params.shared_bytes(warps) > kShared) {
      --params.together;
    }
  }
  const std::int64_t items = static_cast<std::int64_t>(params.pairs) * tiles_of(in);
  const int blocks = multiprocessors() * std::min(divide_up(items, multiprocessors()), PairsParams::kBlocks);

  encoder.set_input_array(x);
  name_inputs(in.weights, encoder);
  if (lhs_indices) {
    encoder.set_input_array(*lhs_indices);
  }
  encoder.set_input_array(rhs_indices);
  encoder.set_output_array(out);
  take_lane(encoder);
  params.x = mx::gpu_ptr<void>(x);
  params.x_index = lhs_indices ? mx::gpu_ptr<unsigned>(*lhs_indices) : nullptr;
  params.w_index = mx::gpu_ptr<unsigned>(rhs_indices);
  params.out = mx::gpu_ptr<void>(out);
  encoder.add_kernel_node_ex(
      kernels().function("quantized_pairs_" + format_name(in.weights) + "_" + type_name(x.dtype())), dim3(blocks), dim3(warps * 32),
      dim3(), static_cast<unsigned>(params.shared_bytes(warps)), params);
}

}  // namespace mlx_cuda
