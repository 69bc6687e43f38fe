#include "attention/decode/launch.h"

#include "device/numbers.cuh"
#include "runtime/memory.h"

#include <mlx/backend/cuda/utils.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <random>

namespace mlx_cuda {

namespace {

// A number that no other call of this process has, of 48 bits. The first is random, so that memory does not hold it by chance.
std::uint64_t call_number() {
  static std::atomic<std::uint64_t> next = [] {
    std::random_device source;
    return std::uint64_t{source()} << 32 | source();
  }();
  return next++ & ((std::uint64_t{1} << 48) - 1);
}

}  // namespace

DecodeStrides strides_of(const mx::array& in) {
  return {in.strides(0), in.strides(1), in.strides(2)};
}

DecodeParams decode_params(const DecodeProblem& problem, const DecodePlan& plan, const AttentionOptions& options) {
  DecodeParams params{};
  static_cast<DecodeSizes&>(params) = problem.sizes;
  static_cast<DecodeTiling&>(params) = plan.tiling;
  params.stream_k = plan.stream_k;
  params.split_k = plan.split_k;
  params.merge_groups = plan.merge_groups;
  params.stages = plan.stages;
  params.softcap = options.softcap;
  params.scale = options.softcap > 0 ? options.scale / options.softcap : options.scale * kLog2e;
  params.plain = !problem.mask && options.softcap == 0 && options.scale > 0;
  return params;
}

void set_arrays(DecodeParams& params, const AttentionArrays& in, Arrays& outputs, KernelNode& node) {
  params.q = node.reads(in.q);
  params.k = node.reads(in.k);
  params.v = node.reads(in.v);
  params.mask = node.reads(in.mask);
  params.starts = node.reads<int>(in.starts);
  params.ends = node.reads<int>(in.ends);
  params.sinks = node.reads(in.sinks);
  params.table = node.reads<int>(in.table);
  params.out = node.writes(outputs[0]);
  params.lse = outputs.size() > 1 ? node.writes<float>(outputs[1]) : nullptr;
  params.q_strides = strides_of(in.q);
  params.k_strides = strides_of(in.k);
  params.v_strides = strides_of(in.v);
  params.out_strides = strides_of(outputs[0]);
  if (in.mask) {
    params.mask_is_bool = in.mask->dtype() == mx::bool_;
    std::copy_n(in.mask->strides().begin(), 4, params.mask_strides);
  }
  params.table_stride = in.table ? in.table->strides(0) : 0;
  params.page_size = in.k.shape(2);
}

void allocate_partials(DecodeParams& params, const DecodePlan& plan, CommandEncoder& encoder, const mx::Stream& stream) {
  if (plan.merge == Merge::none) {
    return;
  }
  const std::size_t results = (plan.partial_rows * (params.value_dim + 2) * sizeof(float) + 15) / 16 * 16;
  auto* memory = static_cast<char*>(workspace(results + plan.tickets * sizeof(std::uint64_t), encoder, stream));
  params.partial_values = reinterpret_cast<float*>(memory);
  params.partial_scales = params.partial_values + plan.partial_rows * params.value_dim;
  params.tickets = reinterpret_cast<unsigned long long*>(memory + results);
  params.call = call_number();
}

void make_readable(AttentionArrays& in, CommandEncoder& encoder, const mx::Stream& stream) {
  in.q = with_readable_rows(in.q, encoder, stream);
  for (auto* array : {&in.table, &in.starts, &in.ends, &in.sinks}) {
    if (*array) {
      *array = with_adjacent_elements(**array, encoder, stream);
    }
  }
}

}  // namespace mlx_cuda
