// All-reduce over the GPUs of a group, in one kernel: each GPU writes its data to all others.
//
// Data is sent as LL packets of 16 bytes, 14 of data and a number, which are written and read atomically: if the number is the
// expected one, the data is there, without a fence or a barrier (as in NCCL's LL protocols, with 4 or 120 bytes of data beside a
// flag of 4 or 8 bytes). A slot is used again for the number after the next: a warp that has received the next packet from a warp
// of another GPU knows that this warp had read the one before. So a warp waits only for the same warp of the other GPUs, and all
// blocks are resident (all_sum.cpp ensures it), so that no two GPUs wait for each other.
#include "all_sum/params.h"
#include "device/kernel.cuh"
#include "device/ptx.cuh"
#include "device/types.cuh"
#include "device/vector.cuh"

namespace mlx_cuda {

constexpr unsigned kAll = ~0u;  // lanes
constexpr int kGroup = 8;       // lanes per group: the packets of eight lanes have the data of seven

// Memory holds 0 at first, and slots keep alternating when numbers wrap around. A slot has the number before the last, or 0.
__device__ inline unsigned after(unsigned number) {
  return number == 0xffff ? 2 : number + 1;
}

// The LL packet of a lane with 16 bytes. Every eighth lane has no data of its own and sends the last two bytes of the others.
__device__ inline uint4 letter_of(uint4 data, unsigned number) {
  unsigned rest[kGroup];
#pragma unroll
  for (int i = 0; i < kGroup - 1; ++i) {
    rest[i] = __shfl_sync(kAll, data.w >> 16, i, kGroup);
  }
  if (threadIdx.x % kGroup == kGroup - 1) {
    data = make_uint4(rest[0] | rest[1] << 16, rest[2] | rest[3] << 16, rest[4] | rest[5] << 16, rest[6]);
  }
  data.w = (data.w & 0xffff) | number << 16;
  return data;
}

// Waits for the LL packets with this number and returns their data.
__device__ inline uint4 receive(const void* from, unsigned number) {
  uint4 letter;
  do {
    letter = load_whole(from);
  } while (__any_sync(kAll, letter.w >> 16 != number));
  const int i = threadIdx.x % kGroup;
  unsigned rest[kGroup / 2];
  const unsigned words[] = {letter.x, letter.y, letter.z, letter.w};
#pragma unroll
  for (int word = 0; word < kGroup / 2; ++word) {
    rest[word] = __shfl_sync(kAll, words[word], kGroup - 1, kGroup);
  }
  const unsigned two = i < 4 ? (i < 2 ? rest[0] : rest[1]) : (i < 6 ? rest[2] : rest[3]);
  letter.w = (letter.w & 0xffff) | (i % 2 ? two & 0xffff0000 : two << 16);
  return letter;
}

// The sum of what `of` gives for each process, in the same order everywhere, so that all have the same bits.
template <typename T, typename Of>
__device__ inline uint4 sum_of(int count, const uint4& added, const Of& of) {
  constexpr int values = sizeof(uint4) / sizeof(T);
  using Values = Vector<T, values>;
  float sums[values] = {};
#pragma unroll 1
  for (int from = 0; from < count; ++from) {
    const uint4 bits = of(from);
#pragma unroll
    for (int i = 0; i < values; ++i) {
      sums[i] += to_float(reinterpret_cast<const Values&>(bits).value[i]);
    }
  }
  uint4 out;
#pragma unroll
  for (int i = 0; i < values; ++i) {
    reinterpret_cast<Values&>(out).value[i] = from_float<T>(sums[i] + to_float(reinterpret_cast<const Values&>(added).value[i]));
  }
  return out;
}

// Loops are not unrolled: a short sum waits for its instructions longer than for anything else.
template <typename T>
__device__ inline void all_sum(const AllSumParams& p) {
  constexpr int warps = AllSumParams::kThreads / 32;
  constexpr int vectors = AllSumParams::kData / 16;  // of a warp's part
  begin_pdl();
  const bool alone = __ldcg(static_cast<const unsigned*>(p.memory[p.rank])) != 0;
  const int warp = blockIdx.x * warps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int vector = lane / kGroup * (kGroup - 1) + lane % kGroup;  // of this lane; every eighth lane has none
  auto* const own_number =
      reinterpret_cast<unsigned long long*>(static_cast<char*>(p.memory[p.rank]) + AllSumParams::kAlone) + warp;
  unsigned long long numbers = __ldcg(own_number);  // of the last packets of each part; some calls have fewer parts
  const auto number_of = [&](int part) { return static_cast<unsigned>(numbers >> 16 * part) & 0xffff; };
  const auto place = [&](int of, int from, int part, unsigned number) {
    const int box = static_cast<int>(number % 2) * (p.count - 1) + (from < of ? from : from - 1);
    const int letters = (box * AllSumParams::kMostWarps + warp) * AllSumParams::most_parts(p.count) + part;
    return static_cast<char*>(p.memory[of]) + AllSumParams::letters() + letters * 32LL * 16 + lane * 16;
  };
  const auto next_to = [&](int process) { return process + 1 < p.count ? process + 1 : 0; };
  const long long all = p.size / 16;
  const auto read = [&](const void* array, long long at) {
    return at < all ? __ldcg(static_cast<const uint4*>(array) + at) : make_uint4(0, 0, 0, 0);
  };
  for (long long first = warp * p.parts * vectors; first < all; first += gridDim.x * warps * p.parts * vectors) {
    const auto at_of = [&](int part) { return lane % kGroup == kGroup - 1 ? all : first + part * vectors + vector; };
    const auto is_there = [&](int part) { return part < p.parts && first + part * vectors < all; };
#pragma unroll 1
    for (int part = 0; is_there(part); ++part) {
      const unsigned before = number_of(part);
      const unsigned number = after(before);
      numbers ^= static_cast<unsigned long long>(before ^ number) << 16 * part;
      const uint4 letter = letter_of(read(p.x, at_of(part)), number);
#pragma unroll 1
      for (int to = next_to(p.rank); to != p.rank && !alone; to = next_to(to)) {  // not all to the same one at once
        store_whole(place(to, p.rank, part, number), letter);
      }
    }
#pragma unroll 1
    for (int part = 0; is_there(part); ++part) {
      const long long at = at_of(part);
      const uint4 own = read(p.x, at);
      const uint4 added = p.added ? read(p.added, at) : make_uint4(0, 0, 0, 0);
      const unsigned number = number_of(part);
      const uint4 sum = sum_of<T>(alone ? 1 : p.count, added, [&](int from) {
        return from == p.rank || alone ? own : receive(place(p.rank, from, part, number), number);
      });
      if (at < all) {
        static_cast<uint4*>(p.out)[at] = sum;
      }
    }
  }
  if (lane == 0 && !alone) {
    *own_number = numbers;
  }
}

#define MLX_CUDA_ALL_SUM(name, dtype) \
  MLX_CUDA_KERNEL(name, (AllSumParams::kThreads, AllSumParams::kBlocksPerMultiprocessor), AllSumParams, all_sum<types::dtype>)
MLX_CUDA_ALL_SUM_KERNELS(MLX_CUDA_ALL_SUM)

}  // namespace mlx_cuda
