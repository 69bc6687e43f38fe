// The GEMV instruction of a persistent kernel: a warp multiplies four rows of w by x, and the epilogue follows.
//
// An MMA has 16 rows and 8 columns: four rows of w, each in four slices of its values, and two digits of x for each slice. Only
// the sums of equal slices are meaningful. The slices take turns at pairs of groups of 64 values, so that one MMA multiplies one
// group of each row and slice, with a scale of its own.
#pragma once

#include "decoding/persistent/inputs.cuh"
#include "decoding/persistent/ring.cuh"
#include "matmul/gemv/gate.cuh"

namespace mlx_cuda {

template <typename T, bool Experts>
class PersistentRows {
  using Params = PersistentParams;
  using Shape = PersistentShape<Experts>;
  using Inputs = PersistentInputs<T, Experts>;

 public:
  __device__ PersistentRows(
      const Params& p, const Share* shares, const Ring<Experts>& ring, PersistentRoute* route, unsigned char* memory)
      : p_(p),
        shares_(shares),
        ring_(ring),
        inputs_(p, route, memory),
        sums_(reinterpret_cast<float*>(memory + Params::x_bytes(p.most_inner) + Params::squares_bytes())),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x / 32),
        team_(warp_ / Params::kTeamWarps),
        member_(warp_ % Params::kTeamWarps) {}

  // By all consumers, instruction after instruction.
  __device__ void run(int index) {
    const PersistentGemv& g = shares_[index].gemv;
    factor_ = 0.0f;
    if constexpr (Experts) {
      odd_ = 0;  // of all teams
      const bool few_rows = g.bits == 8;
      if (g.router >= 0 && warp_ == 0) {
        inputs_.choose(p_.router[g.router]);
      }
      if (few_rows) {
        prefetch_rows(g);
      }
      if (g.turns > 1) {
        inputs_.template prepare<true>(g);
        multiply_summed(shares_[index]);
      } else {
        if (!g.same_x) {
          inputs_.template prepare<false>(g);
        }
        if (few_rows) {
          multiply_rows(g);
        } else {
          multiply(shares_[index]);
        }
      }
    } else {
      inputs_.template prepare<false>(g);
      multiply(shares_[index]);
    }
    sync_some(kAllConsumers, Shape::kConsumers);  // x is no longer read, and all results of this block are stored
    if (g.handoff && threadIdx.x == 0) {
      add_relaxed(counter_of(p_.arrived, index), 1);
    }
  }

 private:
  // ------------------------------------------------------------------------------------------------------------------------ w
  // Teams take turns at the chunks of an instruction. With experts each works out the chunks, otherwise their slots name them.
  __device__ void multiply(const Share& share) {
    const PersistentGemv& g = share.gemv;
    const int of_chunk = g.chunk_slots;
    if constexpr (Experts) {
      Chunks<Experts> chunks(share);
      for (Chunk chunk; chunks.next(chunk);) {
        if (turn_ == team_) {
          multiply(g, chunk, slot_);
        }
        slot_.advance_by(of_chunk, p_.slots);
        turn_ = turn_ + 1 == Shape::kTeams ? 0 : turn_ + 1;
      }
    } else {
      int index = team_ - turn_;
      index += index < 0 ? Shape::kTeams : 0;
      Slot slot = slot_;
      slot.advance_by(index * of_chunk, p_.slots);
      for (; index < share.chunks; index += Shape::kTeams) {
        multiply(g, {}, slot);
        slot.advance_by(Shape::kTeams * of_chunk, p_.slots);
      }
      slot_.advance_by(share.chunks * of_chunk, p_.slots);
      turn_ = (turn_ + share.chunks) % Shape::kTeams;
    }
  }

  // A chunk that begins in a slot, by a team.
  __device__ void multiply(const PersistentGemv& g, Chunk chunk, Slot slot) {
    const unsigned char* w = ring_.wait(slot);
    if constexpr (!Experts) {
      chunk = ring_.chunk(slot);
    }
    const int quad = member_ >> g.split_shift;
    const int splits = 1 << g.split_shift;
    const int split = member_ & (splits - 1);
    const bool mine = quad < chunk.quads;
    const bool finishes = mine && split == 0;
    const unsigned residual = finishes ? first_residual(g, chunk, quad) : 0;
    float totals[3] = {};
    for (int first = 0;;) {
      if (mine) {
        add_slot<false>(totals, w, chunk.quads, quad, split, splits, first, min(g.slot_values, g.inner - first));
      }
      __syncwarp();
      if (lane_ == 0) {
        ring_.release(slot);
      }
      first += g.slot_values;
      if (first >= g.inner) {
        break;
      }
      slot.advance(p_.slots);
      w = ring_.wait(slot);
    }
    float value = sum_of_slices(totals);
    if (splits > 1) {
      const int first = team_ * Params::kTeamWarps + quad * splits;
      value = sum_of_warps(value, first, 1, splits, kAllConsumers + 1 + team_, Params::kTeamWarps * 32);
    }
    if (finishes) {
      finish(g, chunk, quad, value, residual);
    }
  }

  // All teams multiply each chunk of summed experts: they take turns at the experts, and at the results.
  __device__ void multiply_summed(const Share& share) {
    const PersistentGemv& g = share.gemv;
    const int quad = member_ >> g.split_shift;
    const int splits = 1 << g.split_shift;
    const int of_slot = Params::padded(g.inner);
    Chunks<Experts> chunks(share);
    for (Chunk chunk; chunks.next(chunk);) {
      const bool mine = quad < chunk.quads;
      const bool finishes = mine && (member_ & (splits - 1)) == 0 && turn_ == team_;
      const unsigned residual = finishes ? first_residual(g, chunk, quad) : 0;
      float totals[3] = {};
      for (int turn = 0; turn < g.turns; ++turn) {
        if (turn % Shape::kTeams == team_) {
          const unsigned char* w = ring_.wait(slot_);
          if (mine) {
            add_slot<true>(totals, w, chunk.quads, quad, member_ & (splits - 1), splits, turn * of_slot, g.inner);
          }
          __syncwarp();
          if (lane_ == 0) {
            ring_.release(slot_);
          }
        }
        slot_.advance(p_.slots);
      }
      const float value =
          sum_of_warps(sum_of_slices(totals), member_, Params::kTeamWarps, Shape::kTeams, kAllConsumers, Shape::kConsumers);
      if (finishes) {
        finish(g, chunk, quad, value, residual);
      }
      turn_ = turn_ + 1 == Shape::kTeams ? 0 : turn_ + 1;
    }
  }

  // Multiplies a slot: a warp has every `splits`th of its pairs of groups. `Partial`: of the last pair a part may be missing, where
  // x is 0, and the scales of other groups are read.
  template <bool Partial>
  __device__ void add_slot(
      float (&totals)[3], const unsigned char* slot, int quads, int quad, int split, int splits, int first, int values) const {
    const int lane = Experts ? lane_ : opaque(lane_);
    const int row = lane / 16;  // of each half of the quad
    const int slice = lane / 4 % 4;
    const int c = lane % 4;  // of 8 values of a row, and the slice whose sums this lane has
    const int row_bytes = Params::row_bytes(values);
    const int scale_bytes = Params::scale_bytes(values);
    const int low = quad * 2 + row;
    const int own = (2 * slice + slice / 2) * 32 + c * 8;  // the first group of the pair
    const int other = (own ^ 32) - own;                    // from there to the second
    const unsigned begin = shared_address(slot);
    Cursor at;
    at.w = begin + low * row_bytes + own + split * 256;
    at.scales = begin + 4 * quads * row_bytes + low * scale_bytes + c * 4 + split * 16;
    at.x = shared_address(inputs_.x()) + first * 2 + lane / 8 * 256 + lane / 4 % 2 * 64 + c * 16 + split * 1024;
    at.steps = shared_address(inputs_.steps() + first / Params::kGroup + 2 * c) + split * 32;
    at.sum = shared_address(inputs_.sums() + first / Params::kGroup + lane % 8) + split * 32;
    const int bias_row = quad * 2 + lane / 8 % 2 + lane / 16 * quads * 2;
    at.bias = begin + 4 * quads * (row_bytes + scale_bytes) + bias_row * scale_bytes + lane % 8 * 2 + split * 16;
    const unsigned high = quads * 2 * row_bytes;  // from a row to that of the second half
    const unsigned high_scales = quads * 2 * scale_bytes;
    const unsigned last_scales = at.scales - c * 4 + scale_bytes - 4;
    const unsigned last_bias = at.bias - lane % 8 * 2 + scale_bytes - 2;
    const auto load = [&] {
      Pair pair;
      if constexpr (Partial) {
        at.scales = min(at.scales, last_scales);
        at.bias = min(at.bias, last_bias);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        pair.w[i][0] = load8_in_order(at.w + i * other);
        pair.w[i][1] = load8_in_order(at.w + high + i * other);
        pair.x[i] = load16_in_order(at.x + i * 128);
      }
      pair.steps = load8_in_order(at.steps);
      pair.scales[0] = load4_shared(at.scales);
      pair.scales[1] = load4_shared(at.scales + high_scales);
      pair.bias = load2_in_order(at.bias);
      pair.sum = __uint_as_float(load4_shared(at.sum));
      return pair;
    };
    const int count =
        ((Partial ? Params::padded(values) : values) / Params::kPairValues - split + splits - 1) >> __popc(splits - 1);
    if (count <= 0) {
      return;
    }
    Pair next = load();
#pragma unroll 2
    for (int i = 1; i < count; ++i) {
      const Pair pair = next;
      at.advance(splits);
      next = load();
      add_pair(totals, pair, c >= 2);
    }
    add_pair(totals, next, c >= 2);
  }

  // Where a lane reads a pair of groups.
  struct Cursor {
    unsigned w;
    unsigned scales;
    unsigned x;
    unsigned steps;
    unsigned sum;
    unsigned bias;

    __device__ void advance(int pairs) {
      w += pairs * 256;
      scales += pairs * 16;
      x += pairs * 1024;
      steps += pairs * 32;
      sum += pairs * 32;
      bias += pairs * 16;
    }
  };
  // Two groups of each row and slice.
  struct Pair {
    uint2 w[2][2];  // [group][half of the quad]
    uint4 x[2];
    uint2 steps;
    unsigned scales[2];
    unsigned bias;  // of the lane's row and group, with
    float sum;      // of x
  };

  // `swapped`: the lane's slice has the second group first.
  __device__ static void add_pair(float (&totals)[3], const Pair& pair, bool swapped) {
    int sums[2][4] = {};
#pragma unroll
    for (int part = 0; part < 2; ++part) {  // the groups in turn: an MMA takes long to add to another
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint2 low = pair.w[i][0];
        const uint2 high = pair.w[i][1];
        const uint4 x = pair.x[i];
        multiply_bytes(
            sums[i], part == 0 ? nibbles(low.x, high.x) : nibbles(low.y, high.y), part == 0 ? x.x : x.z, part == 0 ? x.y : x.w);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float step = __uint_as_float(i == 0 ? pair.steps.x : pair.steps.y);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float integer = static_cast<float>(sums[i][2 * half] * 128 + sums[i][2 * half + 1]);
        totals[half] = fmaf(one_of(pair.scales[half], swapped != (i == 1), T{}) * step, integer, totals[half]);
      }
    }
    totals[2] = fmaf(one_of(pair.bias, false, T{}), pair.sum, totals[2]);
  }

  static __device__ uint4 nibbles(unsigned low, unsigned high) {
    constexpr unsigned mask = 0x0f0f0f0fu;
    return make_uint4(low & mask, high & mask, low >> 4 & mask, high >> 4 & mask);
  }

  static __device__ float one_of(unsigned pair, bool second, __nv_bfloat16) {
    return __uint_as_float(__byte_perm(pair, 0, second ? 0x3244 : 0x1044));
  }
  static __device__ float one_of(unsigned pair, bool second, __half) {
    return unpack(__byte_perm(pair, 0, second ? 0x4432 : 0x4410), __half{}).x;
  }

  // Lane 0 has the sum of the quad's first row, lane 16 that of the second; lanes 4 and 20 those of the second half.
  __device__ float sum_of_slices(const float (&totals)[3]) const {
    const int from = lane_ / 16 * 16 + lane_ % 4 * 5;  // where row and column are of the same slice
    const float low = __shfl_sync(~0u, totals[0], from);
    const float high = __shfl_sync(~0u, totals[1], from);
    // A lane has a group's biases of one row: the rows' lanes are in the order of rows 0 and 1 of either half.
    const float biases = __shfl_sync(~0u, lanes_sum<8>(totals[2]), lane_ / 16 * 8 + lane_ / 4 % 2 * 16);
    return quad_sum(lane_ & 4 ? high : low) + biases;
  }

  // Of `count` warps, each `step`th from the first one, by all `threads` of a barrier. Sums are in two places in turn: those of the
  // chunk before may still be read.
  __device__ float sum_of_warps(float value, int first, int step, int count, int barrier, int threads) {
    float* const sums = sums_ + odd_ * Params::kMostWarps * Params::kQuadRows;
    odd_ ^= 1;
    const int row = lane_ / 16 + lane_ / 4 % 2 * 2;
    if ((lane_ & 11) == 0) {
      sums[warp_ * Params::kQuadRows + row] = value;
    }
    sync_some(barrier, threads);
    float all = 0.0f;
    for (int i = 0; i < count; ++i) {
      all += sums[(first + i * step) * Params::kQuadRows + row];
    }
    return all;
  }

  // ----------------------------------------------------------------------------------------------------------- rows of 8 bits
  // The first of the two rows of 8-bit values that a warp has.
  __device__ int first_row() const {
    return (warp_ * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x)) * 2;
  }

  __device__ void prefetch_rows(const PersistentGemv& g) const {
    const auto* w = static_cast<const char*>(g.part[0].w) + static_cast<long long>(first_row()) * g.inner;
    for (int at = lane_ * 128; first_row() < g.part[0].columns && at < 2 * g.inner; at += 32 * 128) {
      prefetch(w + at);
    }
  }

  // A lane has a group of both rows at a time.
  __device__ void multiply_rows(const PersistentGemv& g) {
    const GemvPart& part = g.part[0];
    const int groups = g.inner / Params::kGroup;
    for (int row = first_row(); row < part.columns; row += 2 * Shape::kWarps * static_cast<int>(gridDim.x)) {
      float totals[2] = {};
      for (int group = lane_; group < groups; group += 32) {
        const uint2* const x = reinterpret_cast<const uint2*>(inputs_.x() + Inputs::place_of(group) * 128);
        int sums[2][2] = {};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int piece = (i + lane_) % 8;  // in other banks than the other lanes'
          const uint2 upper = x[piece];
          const uint2 lower = x[8 + piece];
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const auto* from = static_cast<const char*>(part.w) + static_cast<long long>(row + j) * g.inner;
            const uint2 w = __ldg(reinterpret_cast<const uint2*>(from + group * Params::kGroup) + piece);
            const unsigned even = __byte_perm(w.x, w.y, 0x6420);
            const unsigned odd = __byte_perm(w.x, w.y, 0x7531);
            sums[j][0] = dot_bytes(odd, upper.y, dot_bytes(even, upper.x, sums[j][0]));
            sums[j][1] = dot_bytes(odd, lower.y, dot_bytes(even, lower.x, sums[j][1]));
          }
        }
        const float step = inputs_.steps()[Inputs::place_of(group)];
        const float sum = inputs_.sums()[group];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int at = (row + j) * groups + group;
          const float scale = to_float(static_cast<const T*>(part.scales)[at]);
          const float bias = to_float(static_cast<const T*>(part.biases)[at]);
          totals[j] += fmaf(scale * step, static_cast<float>(sums[j][0] * 128 + sums[j][1]), bias * sum);
        }
      }
      const float factor = g.norm ? inputs_.size_factor(g) : 1.0f;
      const unsigned pair = pack(warp_sum(totals[0]) * factor, warp_sum(totals[1]) * factor, T{});
      if (lane_ == 0) {
        *reinterpret_cast<unsigned*>(static_cast<T*>(part.out) + row) = pair;
        if (g.handoff) {
          store_relaxed(static_cast<T*>(g.handoff) + row, pair);
        }
      }
    }
  }

  // ------------------------------------------------------------------------------------------------------------------ results
  // The first of the two adjacent rows that a lane has of a quad.
  __device__ int row_of(bool gated, const Chunk& chunk, int quad) const {
    return gated ? (chunk.first + quad) * 2 : chunk.first * 4 + quad * 2 + lane_ / 4 * chunk.quads * 2;
  }

  __device__ const T* added_to(const PersistentGemv& g, const Chunk& chunk, int quad) const {
    return static_cast<const T*>(g.added) + row_of(false, chunk, quad);
  }

  // The numbers that are added to the two results that a lane stores, if they are there yet.
  __device__ unsigned first_residual(const PersistentGemv& g, const Chunk& chunk, int quad) const {
    return g.epilogue == GemvEpilogue::add && (lane_ & ~4) == 0 ? load_relaxed(added_to(g, chunk, quad)) : 0;
  }

  __device__ void finish(const PersistentGemv& g, const Chunk& chunk, int quad, float value, unsigned residual) {
    // Read at once: after the stores below the compiler would read each of them again.
    const GemvEpilogue epilogue = g.epilogue;
    const bool gated = is_gated(epilogue);
    const bool is_polled = g.added_from >= 0;
    const int row = row_of(gated, chunk, quad);
    T* const out = static_cast<T*>(g.part[chunk.part].out) + row;
    T* const handoff = static_cast<T*>(g.handoff) + g.part[chunk.part].first * Params::kQuadRows + row;
    const bool is_handed_over = g.handoff;
    if (factor_ == 0.0f) {
      factor_ = g.norm ? inputs_.size_factor(g) : 1.0f;
    }
    value *= factor_;
    if (gated) {
      const float up = __shfl_xor_sync(~0u, value, 4);
      value = activated(epilogue, value) * up;
    }
    const float next = __shfl_xor_sync(~0u, value, 16);
    if ((lane_ & ~(gated ? 0 : 4)) != 0) {
      return;
    }
    unsigned pair = pack(value, next, T{});
    if (epilogue == GemvEpilogue::add) {
      if (is_polled) {
        poll([&] { return is_set(residual) || (residual = load_relaxed(added_to(g, chunk, quad)), false); });
      }
      const float2 two = unpack(pair, T{});
      const float2 other = unpack(residual, T{});
      pair = pack(two.x + other.x, two.y + other.y, T{});
    }
    *reinterpret_cast<unsigned*>(out) = pair;
    if (is_handed_over) {
      store_relaxed(handoff, pair);
    }
  }

  const Params& p_;
  const Share* const shares_;
  const Ring<Experts>& ring_;
  const Inputs inputs_;
  float* const sums_;  // of warps that share a quad: [odd][team][warp][row]
  const int lane_;
  const int warp_;
  const int team_;
  const int member_;     // of the team
  float factor_ = 0.0f;  // of the results, once it is known
  Slot slot_;
  int turn_ = 0;  // whose chunk is next
  int odd_ = 0;
};

}  // namespace mlx_cuda
