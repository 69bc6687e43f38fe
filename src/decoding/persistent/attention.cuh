// Attention between two instructions of a persistent kernel.
#pragma once

#include "decoding/persistent/inputs.cuh"
#include "decoding/token/part.cuh"

namespace mlx_cuda {

template <typename T>
class AttentionStep {
  using Params = PersistentParams;
  using Traits = PersistentAttention;
  static constexpr int kWarps = Params::kWarps;

 public:
  // `memory`: Params::attention_bytes of shared memory.
  __device__ AttentionStep(const PersistentAttention& a, unsigned char* memory, int* arrived)
      : a_(a), p_(a.token.decode), memory_(memory), arrived_(arrived), lane_(threadIdx.x % 32), warp_(threadIdx.x / 32) {}

  // By all consumers. `counter`: of its result.
  __device__ void run(int counter) const {
    const auto block = static_cast<int>(blockIdx.x);
    if (block < p_.kv_heads * a_.token.row_blocks * a_.parts) {
      attend(block);
    }
    merge();
    arrive(arrived_, counter);
  }

 private:
  __device__ void attend(int block) const {
    TokenPart<T, Traits::kWidth, kWarps, false> part(a_.token, memory_, block % a_.parts, a_.parts, block / a_.parts, 0);
    part.begin();
    part.make_heads([&] { wait_for(arrived_, a_.rows_from); }, [&](auto& head, int kind, int row) { read(head, kind, row); });
    sync_some(kAllConsumers, kConsumers);
    part.attend();
    const int of_warp = a_.token.rows * Traits::kPitch;  // of all rows
    auto* const results = reinterpret_cast<float*>(memory_ + TokenTraits{Traits::kWidth}.part_bytes(kWarps));
    float* const mine = results + warp_ * of_warp;
    part.give(
        [&](int row, float peak, float sum) {
          *reinterpret_cast<float2*>(mine + row * Traits::kPitch + Traits::kWidth) = {peak, sum};
        },
        [&](int row, int column, const float4& v) { *reinterpret_cast<float4*>(mine + row * Traits::kPitch + column) = v; });
    sync_some(kAllConsumers, kConsumers);
#pragma unroll 1
    for (int task = threadIdx.x; task < a_.token.rows * (Traits::kWidth / 4); task += kConsumers) {
      const int at = task / (Traits::kWidth / 4) * Traits::kPitch;
      const int column = task % (Traits::kWidth / 4) * 4;
      const Result result = of_warps(results + at, column, of_warp);
      float* const to = a_.partial + block * of_warp + at;
      store16_relaxed(to + column, result.value);
      if (column == 0) {
        store16_relaxed(to + Traits::kWidth, make_float4(result.peak, result.sum, 0.0f, 0.0f));
      }
    }
  }

  // Four columns of a row, merged in the order of the warps.
  __device__ static Result of_warps(const float* row, int column, int of_warp) {
    float2 scales[kWarps];
    Result result;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      scales[i] = *reinterpret_cast<const float2*>(row + i * of_warp + Traits::kWidth);
      result.peak = nan_max(result.peak, scales[i].x);
    }
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      const float4 v = *reinterpret_cast<const float4*>(row + i * of_warp + column);
      const float weight = shrinking_approx(scales[i].x, result.peak);
      result.sum = fmaf(weight, scales[i].y, result.sum);
      result.value.x = fmaf(weight, v.x, result.value.x);
      result.value.y = fmaf(weight, v.y, result.value.y);
      result.value.z = fmaf(weight, v.z, result.value.z);
      result.value.w = fmaf(weight, v.w, result.value.w);
    }
    return result;
  }

  // A row of a projection.
  __device__ void read(Head<T, Traits::kWidth>& head, int kind, int row) const {
    const int dim = a_.token.heads.dim;
    const T* from = static_cast<const T*>(a_.token.heads.rows[kind]) + row * dim + lane_;
    poll([&] {
      bool all = true;
#pragma unroll
      for (int i = 0; i < Traits::kWidth / 32; ++i) {
        const unsigned short bits = i * 32 + lane_ < dim ? load2_relaxed(from + i * 32) : 0;
        all = all && bits != 0xffff;
        head.row[i] = reinterpret_cast<const T&>(bits);
      }
      return all;
    });
    __syncwarp();
  }

  // A warp for four columns of a row, a lane for each part: always in the same order.
  __device__ void merge() const {
    const int columns = p_.value_dim / 4;
#pragma unroll 1
    for (int task = warp_ * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x); task < p_.kv_heads * p_.group * columns;
         task += kWarps * static_cast<int>(gridDim.x)) {
      const int head = task / columns;
      const int column = task % columns * 4;
      const int row = head % p_.group;
      const int unit = head / p_.group * a_.token.row_blocks + row / a_.token.rows;
      const float* const from = a_.partial + ((unit * a_.parts + lane_) * a_.token.rows + row % a_.token.rows) * Traits::kPitch;
      const bool is_part = lane_ < a_.parts;
      float4 scale = make_float4(-kInfinity, 0.0f, 0.0f, 0.0f);
      float4 value{};
      poll([&] { return !is_part || load_set(scale, from + Traits::kWidth); });
      poll([&] { return !is_part || load_set(value, from + column); });
      __syncwarp();
      Result result;
      result.peak = of_lanes<32>(scale.x, NanMax{});
      const float weight = shrinking_approx(scale.x, result.peak);
      result.sum = warp_sum(weight * scale.y);
      result.value = make_float4(
          warp_sum(weight * value.x), warp_sum(weight * value.y), warp_sum(weight * value.z), warp_sum(weight * value.w));
      if (lane_ == 0) {
        const uint2 four = finished<T>(p_, head, result);
        T* const to = static_cast<T*>(p_.out) + head * p_.value_dim + column;
        store_relaxed(to, four.x);
        store_relaxed(to + 2, four.y);
      }
    }
  }

  __device__ static bool load_set(float4& to, const float* from) {
    const uint4 v = load16_relaxed(from);
    to = make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
    constexpr auto unset = static_cast<unsigned>(Params::kUnset);
    return v.x != unset && v.y != unset && v.z != unset && v.w != unset;
  }

  const PersistentAttention& a_;
  const DecodeParams& p_;
  unsigned char* const memory_;
  int* const arrived_;
  const int lane_;
  const int warp_;
};

// A function of its own, so that the GEMVs around it keep their registers.
template <typename T>
__device__ __noinline__ void attend(const PersistentAttention& a, unsigned char* memory, int* arrived, int counter) {
  AttentionStep<T>(a, memory, arrived).run(counter);
}

}  // namespace mlx_cuda
