// The input of a persistent kernel's instructions: x becomes integers in shared memory, and a router chooses experts.
#pragma once

#include "decoding/persistent/params.h"
#include "decoding/router/route.cuh"
#include "device/mma.cuh"
#include "device/reduce.cuh"
#include "device/relaxed.cuh"
#include "device/vector.cuh"
#include "matmul/gemv/integers.cuh"

namespace mlx_cuda {

// Polls until it is so. No wait takes long, unless the GPU has never all blocks resident at once: then the kernel ends with an
// illegal access instead of waiting for ever.
template <typename Done>
__device__ inline void poll(const Done& done) {
  constexpr long long most = 1ll << 35;  // cycles, about 20 seconds
  long long begin = 0;
#pragma unroll 1
  for (unsigned i = 1; !done(); ++i) {
    if (i % 256 == 0) {
      const long long now = clock64();
      begin = begin == 0 ? now : begin;
      if (now - begin > most) {
        store_relaxed(nullptr, 0);  // a trap would keep ptxas from giving some warps more registers than others
      }
    }
  }
}

// Whether both 16-bit results have been handed over.
__device__ inline bool is_set(unsigned pair) {
  return (pair & 0xffff) != 0xffff && pair >> 16 != 0xffff;
}
__device__ inline bool is_set(const uint4& v) {
  return is_set(v.x) && is_set(v.y) && is_set(v.z) && is_set(v.w);
}

inline constexpr int kAllConsumers = 1;  // the number of their barrier; those of the teams follow, and
inline constexpr int kAttention = kAllConsumers + PersistentParams::kMostTeams + 1;  // that of attention's warps
inline constexpr int kAttentionThreads = PersistentParams::kAttentionWarps * 32;

__device__ inline int* counter_of(int* arrived, int index) {
  return arrived + index * (PersistentParams::kCounterBytes / 4);
}

// Until most of what a counter is of is there, by one thread.
__device__ inline void wait_for_all(int* arrived, int index) {
  const int all = static_cast<int>(gridDim.x) + PersistentParams::kUnset;
  poll([&] { return static_cast<int>(load_relaxed(counter_of(arrived, index))) >= all; });
}

template <typename T, bool Experts>
class PersistentInputs {
  using Params = PersistentParams;
  static constexpr int kConsumers = PersistentShape<Experts>::kConsumers;

 public:
  __device__ PersistentInputs(const Params& p, PersistentRoute* route, unsigned char* memory)
      : p_(p),
        route_(route),
        x_(memory),
        steps_(reinterpret_cast<float*>(memory + p.most_inner * 2)),
        squares_(reinterpret_cast<float*>(memory + Params::x_bytes(p.most_inner))),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x / 32) {}

  // Lets a router choose, by one warp of each block.
  __device__ void choose(const PersistentRouter& router) const {
    if (lane_ == 0) {
      wait_for_all(p_.arrived, router.logits_from);
    }
    __syncwarp();
    with_each(router.params, [&]<int Each>() { choose_of<Each>(router.params); });
    __syncwarp();
    if (lane_ == 0) {
      store_release(&route_->choices, route_->choices + 1);
    }
  }

  // `Summed`: of each expert a row, which is multiplied by its score.
  template <bool Summed>
  __device__ void prepare(const PersistentGemv& g) const {
    constexpr int at_once = 4;
    const int own = g.inner / 8;  // pieces of a turn
    const int of_turn = Summed ? Params::padded(g.inner) / 8 : own;
    const int pieces = Summed ? g.turns * of_turn : own;
    const auto* norms = static_cast<const uint4*>(g.norm);
    const auto* x = static_cast<const uint4*>(g.x);
    const auto load_some = [&](uint4(&to)[at_once], int first, const auto& load) {
#pragma unroll
      for (int i = 0; i < at_once; ++i) {
        const int piece = first + i * kConsumers;
        to[i] = piece < pieces ? load(piece) : uint4{};
      }
    };
    const auto load_norm = [&](int piece) { return norms ? __ldg(norms + piece) : uint4{}; };
    const auto load_x = [&](int piece) {
      if constexpr (Summed) {
        const int turn = piece / of_turn;
        const int rest = piece - turn * of_turn;
        return rest < own ? load16_relaxed(x + turn * own + rest) : uint4{};
      }
      return load16_relaxed(x + piece);
    };
    uint4 weights[at_once];
    load_some(weights, threadIdx.x, load_norm);
    if (g.x_from >= 0) {
      if (threadIdx.x == 0) {
        wait_for_all(p_.arrived, g.x_from);
      }
      sync_some(kAllConsumers, kConsumers);
    }
    float squares = 0.0f;
#pragma unroll 1
    for (int first = threadIdx.x; first < pieces; first += at_once * kConsumers) {
      if (first >= kConsumers) {
        load_some(weights, first, load_norm);
      }
      uint4 values[at_once];
      load_some(values, first, load_x);
      if (g.x_from >= 0) {
        const auto all_set = [&] { return is_set(values[0]) && is_set(values[1]) && is_set(values[2]) && is_set(values[3]); };
        poll([&] { return all_set() || (load_some(values, first, load_x), false); });
      }
#pragma unroll 1
      for (int piece = first; piece < min(pieces, first + at_once * kConsumers); piece += kConsumers) {  // all of the warp
        put(piece, values[0], norms != nullptr, weights[0], Summed ? route_->scores[piece / of_turn] : 1.0f, squares);
#pragma unroll
        for (int i = 1; i < at_once; ++i) {  // so that there is one copy of the code for all
          values[i - 1] = values[i];
          weights[i - 1] = weights[i];
        }
      }
    }
    if (norms) {
      squares = warp_sum(squares);
      if (lane_ == 0) {
        squares_[warp_] = squares;
      }
    }
    sync_some(kAllConsumers, kConsumers);
  }

  // One over the size of a normalized x.
  __device__ float size_factor(const PersistentGemv& g) const {
    float all = 0.0f;
#pragma unroll
    for (int i = 0; i < kConsumers / 32 / 4; ++i) {
      const float4 four = reinterpret_cast<const float4*>(squares_)[i];
      all += (four.x + four.y) + (four.z + four.w);
    }
    return rsqrtf(__fdividef(all, static_cast<float>(g.inner)) + g.eps);
  }

  // [group in its place][digit][value]
  __device__ const unsigned char* x() const {
    return x_;
  }
  // Of groups in their places, and
  __device__ const float* steps() const {
    return steps_;
  }
  // of groups in order.
  __device__ const float* sums() const {
    return steps_ + p_.most_inner / Params::kGroup;
  }

  // Slices 2 and 3 have the second of their pairs of groups first, as `multiply` reads w without bank conflicts.
  static __device__ int place_of(int group) {
    return group ^ (group >> 2 & 1);
  }

 private:
  template <int Each>
  __device__ void choose_of(const RouterParams& router) const {
    const Route<T, Each> routing(router);
    unsigned pairs[Each / 2] = {};
    poll([&] {
      bool all = true;
#pragma unroll
      for (int i = 0; i < Each / 2; ++i) {
        if (routing.is_expert(2 * i)) {
          pairs[i] = load_relaxed(static_cast<const T*>(router.logits) + routing.expert_of(2 * i));
          all = all && is_set(pairs[i]);
        }
      }
      return all;
    });
    __syncwarp();
    float logits[Each];
#pragma unroll
    for (int i = 0; i < Each / 2; ++i) {
      const float2 two = unpack(pairs[i], T{});
      logits[2 * i] = two.x;
      logits[2 * i + 1] = two.y;
    }
    unsigned expert;
    float score = 0.0f;
    routing.run(logits, expert, score);
    if (lane_ < router.count) {
      const T rounded = from_float<T>(score);
      route_->experts[lane_] = expert;
      route_->scores[lane_] = to_float(rounded);
      if (blockIdx.x == 0) {
        router.chosen[lane_] = expert;
        static_cast<T*>(router.scores)[lane_] = rounded;
      }
    }
  }

  // By whole warps, which have adjacent pieces of 8 values.
  __device__ void put(int piece, const uint4& x, bool normed, const uint4& norms, float factor, float& squares) const {
    float values[8];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 two = unpack(word(x, j), T{});
      squares = fmaf(two.x, two.x, fmaf(two.y, two.y, squares));
      const float2 by = normed ? unpack(word(norms, j), T{}) : make_float2(factor, factor);
      values[2 * j] = two.x * by.x;
      values[2 * j + 1] = two.y * by.y;
    }
    const IntegerPiece integers = to_integers<4, Params::kGroup / 8>(values);
    const int place = place_of(piece / 8);
    unsigned char* to = x_ + place * 128 + piece % 8 * 8;
    *reinterpret_cast<uint2*>(to) = integers.upper;
    *reinterpret_cast<uint2*>(to + 64) = integers.lower;
    if (piece % 8 == 0) {
      steps_[place] = integers.group.x;
      steps_[p_.most_inner / Params::kGroup + piece / 8] = integers.group.y;
    }
  }

  const Params& p_;
  PersistentRoute* const route_;
  unsigned char* const x_;
  float* const steps_;
  float* const squares_;  // [warp]
  const int lane_;
  const int warp_;
};

}  // namespace mlx_cuda
