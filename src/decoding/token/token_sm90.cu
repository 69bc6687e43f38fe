// A token's attention and everything between it and the projections, in one kernel: norms and RoPE of heads, the append to the KV
// cache, and attention.
//
// A cluster computes up to eight rows of a kv head, each of its blocks a part of the keys. At the end each block gets all sums for
// some columns of the result.
#include "decoding/token/part.cuh"
#include "device/ptx.cuh"
#include "device/reduce.cuh"
#include "device/types.cuh"

namespace mlx_cuda {

extern __shared__ uint4 token_memory[];

template <typename T, int D>
class Token {
  using Traits = TokenTraits;
  static constexpr TokenTraits kTraits{D};

 public:
  __device__ explicit Token(const TokenParams& p)
      : p_(p.decode),
        h_(p.heads),
        settled_(p.settled != 0),
        rows_(p.rows),
        first_row_(blockIdx.y / p.row_blocks * p.decode.group + blockIdx.y % p.row_blocks * p.rows),
        row_end_((blockIdx.y / p.row_blocks + 1) * p.decode.group),
        block_(blockIdx.x),
        part_(p, token_memory, threadIdx.x, blockIdx.x, Traits::kParts, blockIdx.y, blockIdx.z) {}

  __device__ void run() {
    cluster_arrive();
    if (!settled_) {
      wait_for_grids();
    }
    part_.begin();
    launch_dependents();  // whose reading of weights comes after this
    const auto settle = [&] {
      __syncthreads();
      if (settled_) {
        wait_for_grids();
      }
    };
    part_.make_heads(settle, [&](Head<T, D>& head, int kind, int row) { head.read_row(h_, kind, row); });
    __syncthreads();
    part_.attend();
    cluster_wait();  // the others have begun
    hand_out();
    cluster_arrive();
    cluster_wait();
    merge();
  }

 private:
  // ------------------------------------------------------------------------------------------------------------------- results
  // Sends the sums of this warp's rows to the block of their columns, and their maxima and sums to all.
  __device__ void hand_out() const {
    const int to = static_cast<int>(threadIdx.x) % 32 / 4;
    const int slice = block_ * Traits::kWarps + static_cast<int>(threadIdx.x) / 32;
    part_.give(
        [&](int row, float peak, float sum) { store_in_cluster(address_in(to, scales() + slice * rows_ + row), peak, sum); },
        [&](int row, int column, const float4& v) {
          const int columns = column / Traits::kSliceColumns;
          const float* const mine = sums(columns / Traits::kParts, slice) + row * Traits::kSliceColumns;
          store_in_cluster(address_in(columns % Traits::kParts, mine + column % Traits::kSliceColumns), v.x, v.y, v.z, v.w);
        });
  }

  // Half a warp for four columns of a row, always in the order of the slices.
  __device__ void merge() const {
    constexpr int lanes = 16;
    constexpr int each = Traits::kSlices / lanes;
    const int lane = threadIdx.x % lanes;
    const int tasks = kTraits.column_slices() * rows_ * 4;
#pragma unroll 1
    for (int first = 0; first < tasks; first += Traits::kWarps * 32 / lanes) {
      const int task = min(first + static_cast<int>(threadIdx.x) / lanes, tasks - 1);
      const int row = task / 4 % rows_;
      const int column_slice = task / 4 / rows_;
      float2 scale[each];
      float peak = -kInfinity;
#pragma unroll
      for (int i = 0; i < each; ++i) {
        scale[i] = scales()[(i * lanes + lane) * rows_ + row];
        peak = nan_max(peak, scale[i].x);
      }
#pragma unroll
      for (int offset = lanes / 2; offset > 0; offset /= 2) {
        peak = nan_max(peak, __shfl_xor_sync(~0u, peak, offset, lanes));
      }
      float total[5] = {};
#pragma unroll
      for (int i = 0; i < each; ++i) {
        const float weight = shrinking_approx(scale[i].x, peak);
        const float4 value =
            *reinterpret_cast<const float4*>(sums(column_slice, i * lanes + lane) + row * Traits::kSliceColumns + task % 4 * 4);
        const float terms[5] = {scale[i].y, value.x, value.y, value.z, value.w};
#pragma unroll
        for (int j = 0; j < 5; ++j) {
          total[j] = fmaf(weight, terms[j], total[j]);
        }
      }
#pragma unroll
      for (int offset = lanes / 2; offset > 0; offset /= 2) {
#pragma unroll
        for (float& each_total : total) {
          each_total += __shfl_xor_sync(~0u, each_total, offset, lanes);
        }
      }
      const int column = (column_slice * Traits::kParts + block_) * Traits::kSliceColumns + task % 4 * 4;
      if (lane == 0 && column < p_.value_dim && first_row_ + row < row_end_) {
        finish<T>(
            p_, blockIdx.z, {first_row_ + row, 0}, column, {peak, total[0], make_float4(total[1], total[2], total[3], total[4])});
      }
    }
  }

  // -------------------------------------------------------------------------------------------------------------------- shared
  __device__ float* sums(int column_slice, int slice) const {
    auto* const all = reinterpret_cast<float*>(token_memory) + kTraits.part_bytes(Traits::kWarps) / 4;
    return all + (column_slice * Traits::kSlices + slice) * Traits::sums_pitch(rows_);
  }
  __device__ float2* scales() const {  // [slice][row]: maxima and sums
    return reinterpret_cast<float2*>(sums(kTraits.column_slices(), 0));
  }

  const DecodeParams& p_;
  const HeadsParams& h_;
  const bool settled_;
  const int rows_;
  const int first_row_;  // of all queries
  const int row_end_;    // of the kv head
  const int block_;      // of the cluster
  TokenPart<T, D, Traits::kWarps, true> part_;
};

}  // namespace mlx_cuda

#define MLX_CUDA_TOKEN(name, dtype, D)                                                                                             \
  extern "C" __global__ void __cluster_dims__(mlx_cuda::TokenTraits::kParts) __launch_bounds__(mlx_cuda::TokenTraits::kWarps * 32) \
      name(const __grid_constant__ mlx_cuda::TokenParams params) {                                                                 \
    mlx_cuda::Token<mlx_cuda::types::dtype, D>(params).run();                                                                      \
  }
MLX_CUDA_TOKEN_KERNELS(MLX_CUDA_TOKEN)
