// The sum over the GPUs of a group of what each has: everybody writes to everybody, in one kernel.
//
// Small ones go in letters, without a fence: a half of a letter is written and read whole (the "LL" protocol of NCCL). Large ones
// go in pieces, of which a number says that they are there.
//
// A box is used again for the number after the next: who has begun that one has what everybody wrote for the next one, which they
// did after they had read what belonged to this one. A block waits for the same block of the others alone, and all
// blocks are resident (all_sum.cpp sees to it), so that no two GPUs wait for each other.
#include "all_sum/params.h"
#include "device/grid.cuh"
#include "device/vector.cuh"

namespace mlx_cuda {

// 0 is what memory holds at first, and boxes stay in turns where numbers begin anew.
__device__ inline unsigned after(unsigned number) {
  return number == ~0u ? 2 : number + 1;
}

__device__ inline void send(void* to, uint2 value, unsigned number) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %2};" ::"l"(to), "r"(value.x), "r"(number), "r"(value.y) : "memory");
}

__device__ inline uint2 receive(const void* from, unsigned number) {
  uint4 letter;
  do {
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(letter.x), "=r"(letter.y), "=r"(letter.z), "=r"(letter.w)
                 : "l"(from)
                 : "memory");
  } while (letter.y != number || letter.w != number);
  return make_uint2(letter.x, letter.z);
}

__device__ inline void publish(unsigned* to, unsigned number) {
  asm volatile("fence.acq_rel.sys;\n\tst.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(number) : "memory");
}

__device__ inline void wait_for(const unsigned* from, unsigned number) {
  unsigned found;
  do {
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(found) : "l"(from) : "memory");
  } while (found != number && found != after(number));  // the other one may be one ahead, with the other box
}

__device__ inline bool is_alone(const AllSumParams& p) {
  return __ldcg(static_cast<const unsigned*>(p.memory[p.rank])) != 0;
}

// The sum of what `of` gives for each process, in the same order everywhere, so that all have the same bits.
template <typename T, typename Bits, typename Of>
__device__ inline Bits sum_of(int count, const Bits& added, const Of& of) {
  using Values = Vector<T, sizeof(Bits) / sizeof(T)>;
  constexpr int values = sizeof(Bits) / sizeof(T);
  float sums[values] = {};
  for (int from = 0; from < count; ++from) {
    const Bits bits = of(from);
#pragma unroll
    for (int i = 0; i < values; ++i) {
      sums[i] += to_float(reinterpret_cast<const Values&>(bits).value[i]);
    }
  }
  Bits out;
#pragma unroll
  for (int i = 0; i < values; ++i) {
    reinterpret_cast<Values&>(out).value[i] = from_float<T>(sums[i] + to_float(reinterpret_cast<const Values&>(added).value[i]));
  }
  return out;
}

template <typename T>
__device__ inline void all_sum(const AllSumParams& p) {
  launch_dependents();
  wait_for_grids();
  const bool alone = is_alone(p);
  auto* numbers = reinterpret_cast<unsigned*>(static_cast<char*>(p.memory[p.rank]) + AllSumParams::kAlone);
  const unsigned number = after(__ldcg(numbers + blockIdx.x));
  __syncthreads();
  if (threadIdx.x == 0 && !alone) {
    numbers[blockIdx.x] = number;
  }
  const int at = blockIdx.x * AllSumParams::kThreads + threadIdx.x;
  if (at >= p.size / AllSumParams::kBytes) {
    return;
  }
  const auto place = [&](int of, int from) {
    const long long letter = (static_cast<long long>(number % 2) * p.count + from) * AllSumParams::kMostLetters + at;
    return static_cast<char*>(p.memory[of]) + AllSumParams::letters() + letter * AllSumParams::kLetter;
  };
  const uint2 own = __ldcg(static_cast<const uint2*>(p.x) + at);
  for (int other = 1; other < p.count && !alone; ++other) {  // not all to the same one at once
    const int to = (p.rank + other) % p.count;
    send(place(to, p.rank), own, number);
  }
  const uint2 added = p.added ? __ldcg(static_cast<const uint2*>(p.added) + at) : make_uint2(0, 0);
  static_cast<uint2*>(p.out)[at] = sum_of<T>(
      alone ? 1 : p.count, added, [&](int from) { return from == p.rank || alone ? own : receive(place(p.rank, from), number); });
}

template <typename T>
__device__ inline void all_sum_pieces(const AllSumParams& p) {
  constexpr int loads = AllSumParams::kPieceLoads;
  constexpr int threads = AllSumParams::kPieceThreads;
  constexpr int blocks = AllSumParams::kPieceBlocks;
  constexpr int at_a_time = 4;  // loads that wait together
  launch_dependents();
  wait_for_grids();
  const int other = 1 - p.rank;
  const auto numbers = [&](int of) {  // its own, and then those that the other has written
    return reinterpret_cast<unsigned*>(static_cast<char*>(p.memory[of]) + AllSumParams::numbers(2));
  };
  const bool alone = is_alone(p);
  unsigned number = __ldcg(numbers(p.rank) + blockIdx.x);
  const long long all = p.size / 16;
  const long long distance = static_cast<long long>(p.loads) * threads;
  for (long long first = blockIdx.x * distance; first < all; first += gridDim.x * distance) {
    number = after(number);
    const int count = static_cast<int>(min(distance, all - first));
    const uint4* const x = static_cast<const uint4*>(p.x) + first;
    const auto box = [&](int of) {
      char* const pieces = static_cast<char*>(p.memory[of]) + AllSumParams::pieces();
      return reinterpret_cast<uint4*>(pieces + (static_cast<long long>(number % 2) * blocks + blockIdx.x) * AllSumParams::kPiece);
    };
    uint4 own[loads];
#pragma unroll
    for (int load = 0; load < loads; ++load) {
      const int at = load * threads + threadIdx.x;
      own[load] = at < count ? __ldcg(x + at) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int load = 0; load < loads; ++load) {
      const int at = load * threads + threadIdx.x;
      if (at < count && !alone) {
        box(other)[at] = own[load];
      }
    }
    __syncthreads();
    if (threadIdx.x == 0 && !alone) {
      publish(numbers(other) + blocks + blockIdx.x, number);
      wait_for(numbers(p.rank) + blocks + blockIdx.x, number);
    }
    __syncthreads();
#pragma unroll
    for (int begin = 0; begin < loads; begin += at_a_time) {
      uint4 theirs[at_a_time];
      uint4 added[at_a_time];
#pragma unroll
      for (int load = 0; load < at_a_time; ++load) {
        const int at = (begin + load) * threads + threadIdx.x;
        theirs[load] = at < count && !alone ? __ldcg(box(p.rank) + at) : make_uint4(0, 0, 0, 0);
        added[load] = at < count && p.added ? __ldcg(static_cast<const uint4*>(p.added) + first + at) : make_uint4(0, 0, 0, 0);
      }
#pragma unroll
      for (int load = 0; load < at_a_time; ++load) {
        const int at = (begin + load) * threads + threadIdx.x;
        if (at < count) {
          static_cast<uint4*>(p.out)[first + at] =  // of two, either order gives the same bits
              sum_of<T>(2, added[load], [&](int from) { return from == 0 ? own[begin + load] : theirs[load]; });
        }
      }
    }
  }
  if (threadIdx.x == 0 && !alone) {
    numbers(p.rank)[blockIdx.x] = number;
  }
}

}  // namespace mlx_cuda

#define MLX_CUDA_ALL_SUM(name, T)                                                                                                  \
  extern "C" __global__ void __launch_bounds__(mlx_cuda::AllSumParams::kThreads, mlx_cuda::AllSumParams::kBlocksPerMultiprocessor) \
      all_sum_##name(const __grid_constant__ mlx_cuda::AllSumParams params) {                                                      \
    mlx_cuda::all_sum<T>(params);                                                                                                  \
  }                                                                                                                                \
  extern "C" __global__ void __launch_bounds__(                                                                                    \
      mlx_cuda::AllSumParams::kPieceThreads, mlx_cuda::AllSumParams::kPieceBlocksPerMultiprocessor)                                \
      all_sum_pieces_##name(const __grid_constant__ mlx_cuda::AllSumParams params) {                                               \
    mlx_cuda::all_sum_pieces<T>(params);                                                                                           \
  }

MLX_CUDA_ALL_SUM(float32, float)
MLX_CUDA_ALL_SUM(float16, __half)
MLX_CUDA_ALL_SUM(bfloat16, __nv_bfloat16)
