#include "recurrence/calls.h"

#include <optional>

namespace mlx_cuda {

namespace {

Stored stored(mx::Dtype dtype) {
  return dtype == mx::float32 ? Stored::float32 : dtype == mx::float16 ? Stored::float16 : Stored::bfloat16;
}

}  // namespace

Parts parts_of(const LinearAttention& in, Way way) {
  return {way, in.state.has_value(), in.mask.has_value(), in.offsets.has_value()};
}

Arrays to_inputs(const LinearAttention& in) {
  return joined({in.q, in.k, in.v, in.g, in.beta}, in.state, in.mask, in.offsets);
}

LinearAttention from_inputs(const Arrays& in, const Parts& parts) {
  std::size_t place = 5;
  const auto optional = [&](bool there) { return there ? std::optional(in[place++]) : std::nullopt; };
  return {in[0], in[1], in[2], in[3], in[4], optional(parts.state), optional(parts.mask), optional(parts.offsets)};
}

Operand operand(const mx::array& in, KernelNode& node) {
  return {node.reads(in), in.strides(0), in.strides(1), in.strides(2), stored(in.dtype())};
}

Recurrence describe(const LinearAttention& in, bool delta, KernelNode& node) {
  Recurrence p{};
  p.q = operand(in.q, node);
  p.k = operand(in.k, node);
  p.v = operand(in.v, node);
  p.g = operand(in.g, node);
  p.beta = operand(in.beta, node);
  p.mask = node.reads<const bool>(in.mask);
  p.offsets = node.reads<const int>(in.offsets);
  if (in.mask) {
    p.mask_batch = in.mask->strides(0);
    p.mask_token = in.mask->strides(1);
  }
  p.length = in.v.shape(1);
  p.key_heads = in.k.shape(2);
  p.value_heads = in.v.shape(2);
  p.key_size = in.k.shape(3);
  p.value_size = in.v.shape(3);
  p.delta = delta;
  return p;
}

PreparedMemory::PreparedMemory(int value_size)
    : w(kChunk * kChunkKeys * 2),
      v(std::int64_t{kChunk} * ceil_div(value_size, kScanColumns) * kScanColumns * 2),
      p(kChunk * kChunk * 2),
      decay(2 * kChunk * 4) {}

Prepared PreparedMemory::divide(char* base, int chunks, std::int64_t heads) const {
  const std::int64_t blocks = chunks * heads;
  Prepared result{};
  result.w = base;
  result.v = base + w * blocks;
  result.p = base + (w + v) * blocks;
  result.decay = reinterpret_cast<float*>(base + (w + v + p) * blocks);
  result.chunks = chunks;
  return result;
}

}  // namespace mlx_cuda
