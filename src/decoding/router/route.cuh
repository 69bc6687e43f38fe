// The MoE router of one token by one warp: softmax, top-k and scores.
#pragma once

#include "decoding/router/params.h"
#include "device/mma.cuh"
#include "device/numbers.cuh"
#include "device/reduce.cuh"
#include "device/types.cuh"
#include "device/vector.cuh"

namespace mlx_cuda {

__device__ inline unsigned warp_max(unsigned value) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(~0u, value);
#else
  return of_lanes<32>(value, [](unsigned one, unsigned other) { return max(one, other); });
#endif
}

// A lane has `Each` adjacent experts. Scores are rounded as MLX's arrays of T are: if rounded scores are equal, the lower or the
// higher expert number wins.
template <typename T, int Each>
class Route {
  static constexpr bool kShort = sizeof(T) == 2;  // a key has the score and the number

 public:
  __device__ explicit Route(const RouterParams& p) : p_(p), lane_(threadIdx.x % 32) {}

  __device__ int expert_of(int i) const {
    return lane_ * Each + i;
  }
  __device__ bool is_expert(int i) const {
    return expert_of(i) < p_.experts;
  }

  // `scores`: the logits. Lane i gets the expert of place i, and its score.
  __device__ void run(float (&scores)[Each], unsigned& chosen, float& score) const {
    if (p_.before == RouterScores::softmax) {
      soften(scores);
    }
    unsigned keys[Each];
#pragma unroll
    for (int i = 0; i < Each; ++i) {
      keys[i] = is_expert(i) ? key_of(scores[i], i) : 0;
    }
    chosen = 0;
#pragma unroll 1
    for (int place = p_.count - 1; place >= 0; --place) {
      const unsigned best = take_best(keys);
      chosen = lane_ == place ? best : chosen;
    }
#pragma unroll
    for (int i = 0; i < Each; ++i) {
      const float other = __shfl_sync(~0u, scores[i], static_cast<int>(chosen / Each));
      score = chosen % Each == i ? other : score;
    }
    const bool is_one = lane_ < p_.count;
    const float top = of_lanes<32>(is_one ? score : -kInfinity, NanMax{});
    if (p_.after == RouterScores::softmax) {
      score = is_one ? __expf(score - top) : 0.0f;
    }
    if (p_.after != RouterScores::plain) {
      score /= warp_sum(is_one ? score : 0.0f);
    }
  }

 private:
  __device__ void soften(float (&scores)[Each]) const {
    float top = -kInfinity;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < Each; ++i) {
      top = is_expert(i) ? nan_max(top, scores[i]) : top;
    }
    top = of_lanes<32>(top, NanMax{});
#pragma unroll
    for (int i = 0; i < Each; ++i) {
      scores[i] = is_expert(i) ? __expf(scores[i] - top) : 0.0f;
      sum += scores[i];
    }
    sum = warp_sum(sum);
#pragma unroll
    for (float& score : scores) {
      score = to_float(from_float<T>(score / sum));
    }
  }

  // Of equal scores the highest rank wins.
  __device__ unsigned rank_of(int i) const {
    return p_.first_of_equals ? RouterParams::kMostExperts - expert_of(i) : expert_of(i) + 1;
  }

  // Numbers in the order of the scores, none of them 0. As many are chosen whatever there is: to MLX's sort NaN is the highest
  // number, so that of the scores it is chosen, of their negatives not.
  __device__ unsigned key_of(float score, int i) const {
    const float number = score == score ? score + 0.0f : p_.first_of_equals ? -kInfinity : kInfinity;  // -0 equals 0
    unsigned bits = __float_as_uint(number);
    if constexpr (kShort) {
      bits = pack(0.0f, number, T{});
    }
    const unsigned key = bits >> 31 ? ~bits : bits | 0x80000000u;
    return kShort ? (key & 0xffff0000u) | rank_of(i) : key;
  }

  // The expert with the highest key, which is 0 then.
  __device__ unsigned take_best(unsigned (&keys)[Each]) const {
    unsigned best = 0;
#pragma unroll
    for (const unsigned key : keys) {
      best = max(best, key);
    }
    best = warp_max(best);
    unsigned rank = best & 0xffffu;
    if constexpr (!kShort) {
      rank = 0;
#pragma unroll
      for (int i = 0; i < Each; ++i) {
        rank = keys[i] == best ? max(rank, rank_of(i)) : rank;
      }
      rank = warp_max(rank);
    }
#pragma unroll
    for (int i = 0; i < Each; ++i) {
      keys[i] = rank_of(i) == rank ? 0 : keys[i];
    }
    return p_.first_of_equals ? RouterParams::kMostExperts - rank : rank - 1;
  }

  const RouterParams& p_;
  const int lane_;
};

// Calls it for so many experts of a lane.
template <typename Call>
__device__ inline void with_each(const RouterParams& p, const Call& call) {
  if (p.experts <= 128) {
    call.template operator()<4>();
  } else {
    call.template operator()<RouterParams::kMostExperts / 32>();
  }
}

}  // namespace mlx_cuda
