#include "matmul/grouped/quantized.h"

#include "matmul/grouped/params.h"
#include "matmul/grouped/plan.h"
#include "runtime/device_code.h"
#include "runtime/lanes.h"
#include "runtime/memory.h"
#include "runtime/status.h"
#include "runtime/tensor_map.h"

#include <algorithm>
#include <cstdint>
#include <string>

namespace mlx_cuda {

namespace {

constexpr int kTileRows = 128;
constexpr int kFewRows = 16;  // of a box for tiles of few rows
constexpr int kColumns = 256;
constexpr int kDepth = 64;
constexpr int kStages = 4;
constexpr unsigned kThreads = 384;

KernelModule& kernels() {
  static KernelModule module("grouped_quantized_sm90");
  return module;
}

// Bytes that a thread of the kernel copies at once.
int vector_bytes(int bits) {
  return bits % 4 == 0 ? 16 : bits % 2 == 0 ? 8 : 4;
}

// As Ring::kBytes and Packed::kBytes of the kernel.
unsigned shared_bytes(int bits) {
  const int ring = kStages * (kTileRows + kColumns) * kDepth * 2 + 1024 + 2 * kStages * 8;
  const int step = kColumns * kDepth * bits / 8;
  return static_cast<unsigned>((ring + 15) / 16 * 16 + std::min(32 * 1024 / step, 8) * step);
}

// [rows, inner] with the dimension of one head that the copy engine's maps have.
mx::array as_heads(const mx::array& x) {
  mx::array heads({x.shape(0), 1, x.shape(1)}, x.dtype(), nullptr, {});
  heads.copy_shared_buffer(x, {x.strides(0), x.strides(0), x.strides(1)}, {false, false, false}, x.data_size());
  return heads;
}

}  // namespace

bool can_unpack(const QuantizedWeights& weights) {
  return is_hopper() && weights.inner() % kDepth == 0;
}

Readable unpackable(const QuantizedWeights& weights, mx::cu::CommandEncoder& encoder, const mx::Stream& stream) {
  return readable(weights, false, vector_bytes(weights.bits), encoder, stream);
}

void encode_unpacked(
    const mx::array& x, const mx::array& offsets, const Readable& weights, mx::array& out, mx::cu::CommandEncoder& encoder) {
  const QuantizedWeights& in = weights.weights;
  encoder.set_input_array(x);
  encoder.set_input_array(offsets);
  name_inputs(in, encoder);
  encoder.set_output_array(out);
  take_lane(encoder);
  GroupedQuantizedParams params{};
  params.rows.offsets = mx::gpu_ptr<int>(offsets);
  params.rows.out = mx::gpu_ptr<void>(out);
  params.rows.has_begin = 1;
  params.rows.groups = in.w.shape(0);
  params.rows.count = params.rows.groups;
  params.rows.rows = x.shape(0);
  params.rows.columns = in.w.shape(1);
  params.rows.depth = x.shape(1);
  set_weights(params, weights);
  params.row_bytes = weights.row_bytes;
  params.row_groups = in.scales.shape(-1);
  const mx::array heads = as_heads(x);
  CUtensorMap x_map = tensor_map(heads, kTileRows);
  CUtensorMap few_x_map = tensor_map(heads, kFewRows);
  encoder.add_kernel_node_ex(
      kernels().function("grouped_" + format_name(in) + "_" + type_name(x.dtype())), dim3(static_cast<unsigned>(multiprocessors())),
      dim3(kThreads), dim3(), shared_bytes(in.bits), params, x_map, few_x_map);
}

}  // namespace mlx_cuda
