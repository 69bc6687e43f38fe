// The weights of a persistent kernel on their way through shared memory: a producer thread loads chunk after chunk, of all
// instructions, into slots, and the warps of a team compute with each.
#pragma once

#include "decoding/persistent/params.h"
#include "device/relaxed.cuh"

namespace mlx_cuda {

// Adjacent quads of one part, and of one expert.
struct alignas(16) Chunk {
  int part;
  int expert;  // of the chosen ones
  int first;
  int quads;
};

// The part of an instruction that a block computes, in shared memory.
struct Share {
  PersistentGemv gemv;
  int begin;  // quads
  int end;
  int chunks;
  int unused;
};

// A block's chunks of an instruction, in order.
template <bool Experts>
class Chunks {
 public:
  __device__ explicit Chunks(const Share& share)
      : g_(share.gemv),
        of_experts_(Experts && share.gemv.expert_quads > 0),
        most_(PersistentParams::kTeamWarps >> g_.split_shift),
        quad_(share.begin),
        end_(share.end) {
    enter(0);
  }

  __device__ bool next(Chunk& chunk) {
    if (quad_ >= end_) {
      return false;
    }
    while (quad_ >= last_) {
      enter(part_ + 1);
    }
    chunk = {of_experts_ ? 0 : part_, of_experts_ ? part_ : 0, quad_ - first_, min(last_ - quad_, most_)};
    quad_ += chunk.quads;
    return true;
  }

  // Of all that are left.
  __device__ int count() {
    int all = 0;
    for (int quad = quad_; quad < end_; quad = last_) {
      while (quad >= last_) {
        enter(part_ + 1);
      }
      all += (last_ - quad + most_ - 1) / most_;
    }
    return all;
  }

 private:
  __device__ void enter(int part) {
    part_ = part;
    if (of_experts_) {
      first_ = 0;
      last_ = min((part + 1) * g_.expert_quads, end_);
      return;
    }
    first_ = g_.part[part].first;
    const bool is_last = is_gated(g_.epilogue) || part + 1 == g_.parts;
    last_ = is_last ? end_ : min(g_.part[part + 1].first, end_);
  }

  const PersistentGemv& g_;
  const bool of_experts_;
  const int most_;
  int quad_;
  const int end_;
  int part_;   // or an expert
  int first_;  // quads of the part, and
  int last_;   // after the last
};

// A position in the ring, and how often it has come round.
struct Slot {
  int at = 0;
  int round = 0;

  __device__ void advance(int slots) {
    if (++at == slots) {
      at = 0;
      ++round;
    }
  }
  __device__ void advance_by(int count, int slots) {
    at += count;
    while (at >= slots) {
      at -= slots;
      ++round;
    }
  }
};

// A slot, besides its memory. Teams take chunks in turn, so one may wait for a slot before the load of the round before is
// complete, when the parity of `full` is the same as after the next load. Hence `round`, that of the load, which a team waits for
// first.
struct alignas(16) SlotState {
  Chunk chunk;  // where no experts are chosen
  Barrier full;
  Barrier empty;
  int round;
};
static_assert(sizeof(SlotState) == PersistentParams::kSlotState);

// `Experts`: whether a router chooses the weights of some instructions.
template <bool Experts>
class Ring {
  using Params = PersistentParams;

 public:
  __device__ Ring(const Params& p, const Share* shares, PersistentRoute* route, unsigned char* memory)
      : p_(p),
        shares_(shares),
        route_(route),
        memory_(memory),
        states_(reinterpret_cast<SlotState*>(memory + p.slots * p.slot_bytes)) {}

  // By one thread, before any other uses it.
  __device__ void init() const {
    for (int i = 0; i < p_.slots; ++i) {
      barrier_init(&states_[i].full, Params::kMatrices);
      barrier_init(&states_[i].empty, Params::kTeamWarps);
      states_[i].round = -1;
    }
    route_->choices = 0;
    barrier_init_fence();
  }

  __device__ const unsigned char* wait(const Slot& slot) const {
    SlotState& state = states_[slot.at];
    while (load_acquire(&state.round) != slot.round) {
    }
    barrier_wait(&state.full, slot.round & 1);
    return memory_ + slot.at * p_.slot_bytes;
  }
  // The chunk in a slot that was waited for, until the slot is released.
  __device__ const Chunk& chunk(const Slot& slot) const {
    return states_[slot.at].chunk;
  }
  // By one thread of each warp of the team, when the warp no longer reads it.
  __device__ void release(const Slot& slot) const {
    barrier_arrive(&states_[slot.at].empty);
  }

  // Loads one of the matrices of all instructions, by one thread. Its instructions are on the way of all weights: few for a chunk.
  __device__ void produce(int matrix) const {
    Slot slot;
    Slot landed;  // the oldest that is being loaded
    int flying = 0;
    int choices = 0;  // of routers
    const unsigned long long once = evict_first();
    for (int i = 0; i < p_.count; ++i) {
      const PersistentGemv& g = shares_[i].gemv;
      const bool gated = is_gated(g.epilogue);
      const int inner = g.inner;
      const int slot_values = g.slot_values;
      const int in_flight = g.in_flight;
      const int row_bytes = Params::matrix_bytes(matrix, inner);
      const int turns = Experts ? g.turns : 1;
      const bool of_experts = Experts && g.of_experts();
      if (of_experts) {
        choices = g.router >= 0 ? g.router + 1 : choices;
        while (load_acquire(&route_->choices) < choices) {
        }
      }
      Chunks<Experts> chunks(shares_[i]);
      for (Chunk chunk; chunks.next(chunk);) {
        const GemvPart& part = g.part[chunk.part];
        const int half_rows = chunk.quads * 2;
        for (int turn = 0; turn < turns; ++turn) {
          int row = chunk.first * (gated ? 2 : 4);
          if (of_experts) {  // rows of w are those of all experts, of the result those of the chosen ones
            row += (static_cast<int>(route_->experts[turns > 1 ? turn : chunk.expert]) - chunk.expert) * part.columns;
          }
          const long long at = static_cast<long long>(row) * row_bytes;
          const char* from[2];
          from[0] = matrix_of(part, matrix) + at;
          from[1] = gated ? matrix_of(g.part[1], matrix) + at : from[0] + half_rows * row_bytes;
          for (int first = 0; first < inner; first += slot_values) {
            const int values = min(slot_values, inner - first);
            while (flying >= in_flight) {
              barrier_wait(&states_[landed.at].full, landed.round & 1);
              landed.advance(p_.slots);
              --flying;
            }
            SlotState& state = states_[slot.at];
            if (slot.round > 0) {
              barrier_wait(&state.empty, (slot.round - 1) & 1);
            }
            ++flying;
            Barrier* const full = &state.full;
            const int half = half_rows * Params::matrix_bytes(matrix, values);
            const int before = matrix == 0 ? 0 : 2 * half_rows * Params::row_bytes(values) + (matrix - 1) * 2 * half;
            unsigned char* const to = memory_ + slot.at * p_.slot_bytes + before;
            if (matrix == 0) {
              if constexpr (!Experts) {
                state.chunk = chunk;
              }
              store_release(&state.round, slot.round);
            }
            barrier_expect(full, 2 * half);
            if (values == inner) {
              copy_bytes_once(to, from[0], gated ? half : 2 * half, full, once);
              if (gated) {
                copy_bytes_once(to + half, from[1], half, full, once);
              }
            } else {
              load_rows(
                  to, from, half_rows, row_bytes, Params::matrix_bytes(matrix, first), Params::matrix_bytes(matrix, values), full,
                  once);
            }
            slot.advance(p_.slots);
          }
        }
      }
    }
  }

 private:
  static __device__ const char* matrix_of(const GemvPart& part, int matrix) {
    return static_cast<const char*>(matrix == 0 ? part.w : matrix == 1 ? part.scales : part.biases);
  }

  // Parts of rows.
  static __device__ void load_rows(
      unsigned char* to,
      const char* const (&from)[2],
      int half_rows,
      int row_bytes,
      int first,
      int bytes,
      Barrier* full,
      unsigned long long once) {
    for (int i = 0; i < 2 * half_rows; ++i) {
      const char* row = i < half_rows ? from[0] + i * row_bytes : from[1] + (i - half_rows) * row_bytes;
      copy_bytes_once(to + i * bytes, row + first, bytes, full, once);
    }
  }

  const Params& p_;
  const Share* const shares_;
  PersistentRoute* const route_;
  unsigned char* const memory_;
  SlotState* const states_;
};

}  // namespace mlx_cuda
