// Attention in a persistent kernel, by warps of its own: they prepare for it while the others still compute what gives its rows.
#pragma once

#include "decoding/persistent/inputs.cuh"
#include "decoding/token/part.cuh"

namespace mlx_cuda {

template <typename T>
class AttentionStep {
  using Params = PersistentParams;
  using Traits = PersistentAttention;
  static constexpr int kWarps = Params::kAttentionWarps;
  static constexpr int kColumnQuads = Traits::kWidth / 4;

 public:
  // `thread`: of its warps. `memory`: Params::attention_bytes of shared memory.
  __device__ AttentionStep(const PersistentAttention& a, int thread, unsigned char* memory, int* arrived, int counter)
      : a_(a), p_(a.token.decode), memory_(memory), arrived_(arrived), counter_(counter), thread_(thread) {}

  __device__ void run() const {
    const auto block = static_cast<int>(blockIdx.x);
    if (block < p_.kv_heads * a_.token.row_blocks * a_.parts) {
      attend(block);
    }
    merge();
    sync_some(kAttention, kAttentionThreads);
    if (thread_ == 0) {
      add_relaxed(counter_of(arrived_, counter_), 1);
    }
  }

 private:
  __device__ void attend(int block) const {
    TokenPart<T, Traits::kWidth, kWarps, false> part(a_.token, memory_, thread_, block % a_.parts, a_.parts, block / a_.parts, 0);
    part.begin();
    part.make_heads([&] { settle(); }, [&](auto& head, int kind, int row) { read(head, kind, row); });
    sync_some(kAttention, kAttentionThreads);
    part.attend();
    const int of_warp = a_.token.rows * Traits::kPitch;  // of all rows
    auto* const results = reinterpret_cast<float*>(memory_ + TokenTraits{Traits::kWidth}.part_bytes(kWarps));
    float* const mine = results + thread_ / 32 * of_warp;
    part.give(
        [&](int row, float peak, float sum) {
          *reinterpret_cast<float2*>(mine + row * Traits::kPitch + Traits::kWidth) = {peak, sum};
        },
        [&](int row, int column, const float4& v) { *reinterpret_cast<float4*>(mine + row * Traits::kPitch + column) = v; });
    sync_some(kAttention, kAttentionThreads);
#pragma unroll 1
    for (int task = thread_; task < a_.token.rows * kColumnQuads; task += kAttentionThreads) {
      const int at = task / kColumnQuads * Traits::kPitch;
      const int column = task % kColumnQuads * 4;
      const Result result = of_warps(results + at, column, of_warp);
      float* const to = a_.partial + block * of_warp + at;
      store16_relaxed(to + column, result.value);
      if (column == 0) {
        store16_relaxed(to + Traits::kWidth, make_float4(result.peak, result.sum, 0.0f, 0.0f));
      }
    }
  }

  __device__ void settle() const {
    if (thread_ == 0) {
      wait_for_all(arrived_, a_.rows_from);
    }
    sync_some(kAttention, kAttentionThreads);
  }

  // Four columns of a row, merged in the order of the warps.
  __device__ static Result of_warps(const float* row, int column, int of_warp) {
    Result result;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      result.add(
          *reinterpret_cast<const float2*>(row + i * of_warp + Traits::kWidth),
          *reinterpret_cast<const float4*>(row + i * of_warp + column));
    }
    return result;
  }

  // A row of a projection.
  __device__ void read(Head<T, Traits::kWidth>& head, int kind, int row) const {
    const int dim = a_.token.heads.dim;
    const int lane = thread_ % 32;
    const T* from = static_cast<const T*>(a_.token.heads.rows[kind]) + row * dim + lane;
    poll([&] {
      bool all = true;
#pragma unroll
      for (int i = 0; i < Traits::kWidth / 32; ++i) {
        const unsigned short bits = i * 32 + lane < dim ? load2_relaxed(from + i * 32) : 0;
        all = all && bits != 0xffff;
        head.row[i] = reinterpret_cast<const T&>(bits);
      }
      return all;
    });
    __syncwarp();
  }

  // A lane for four columns of a row and a part: always in the same order.
  __device__ void merge() const {
    constexpr int lanes = Traits::kMostParts;
    const int columns = p_.value_dim / 4;
    const int tasks = p_.kv_heads * p_.group * columns;
    const int step = kAttentionThreads / lanes * static_cast<int>(gridDim.x);
    const int lane = thread_ % lanes;
    const int own = thread_ / lanes * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
#pragma unroll 1
    for (int first = 0; first < tasks; first += step) {  // by whole warps
      const int task = first + own;
      const int head = task / columns;
      const int column = task % columns * 4;
      const int row = head % p_.group;
      const int unit = head / p_.group * a_.token.row_blocks + row / a_.token.rows;
      const float* const from = a_.partial + ((unit * a_.parts + lane) * a_.token.rows + row % a_.token.rows) * Traits::kPitch;
      const bool is_part = task < tasks && lane < a_.parts;
      float4 scale = make_float4(-kInfinity, 0.0f, 0.0f, 0.0f);
      float4 value{};
      poll([&] { return !is_part || (load_set(scale, from + Traits::kWidth) && load_set(value, from + column)); });
      __syncwarp();
      Result result;
      result.peak = of_lanes<lanes>(scale.x, NanMax{});
      const float weight = shrinking_approx(scale.x, result.peak);
      result.sum = lanes_sum<lanes>(weight * scale.y);
      result.value = make_float4(
          lanes_sum<lanes>(weight * value.x), lanes_sum<lanes>(weight * value.y), lanes_sum<lanes>(weight * value.z),
          lanes_sum<lanes>(weight * value.w));
      if (is_part && lane == 0) {
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
  const int counter_;  // of the result
  const int thread_;
};

}  // namespace mlx_cuda
