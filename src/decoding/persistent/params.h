// A persistent kernel that computes GEMVs of a decode step, each of whose x may be the result of one before, with attention
// and routers between them: what host and device share.
#pragma once

#include "decoding/router/params.h"
#include "decoding/token/params.h"
#include "matmul/gemv/params.h"

namespace mlx_cuda {

// One instruction: GEMVs of the same x [inner] with affine weights in groups of 64, in MLX's layout.
//
// Rows of w with 4-bit values are divided in quads, one for each warp at a time: two adjacent rows and the two half a chunk later
// or, where the epilogue is gated, the same two of the second part. With 8-bit values, of which a router has few rows, a warp reads
// two rows straight from memory.
//
// MoE: w of a part is the matrices of all experts, [experts, columns, inner]. Either each of the chosen ones gives `expert_quads`
// of gated results, one expert after another; or each is multiplied by its own row of x, [turns, inner], times its score, and the
// results are summed, as if inner were `turns` times as long.
struct PersistentGemv {
  const void* x;
  const void* norm;   // [inner], or null
  const void* added;  // [columns], or null
  void* handoff;      // a second copy of the result for later instructions, or null
  int router;         // the one that chooses before it, or -1
  int x_from;         // the counter of what gives x; -1: an earlier kernel
  int added_from;     // the same of `added`
  int same_x;         // whether x is that of the instruction before, with the same norm
  float eps;
  int bits;
  int inner;
  int slot_values;   // of each row, in a slot: all of inner, or a multiple of kPairValues
  int chunk_slots;   // slots of a chunk
  int in_flight;     // slots that are being loaded, at most: more would delay what is handed over
  int split_shift;   // log2 of the warps that share a quad
  int quads;         // 0 with 8 bits
  int share_quads;   // a block's quads are a multiple of this
  int expert_quads;  // or 0
  int turns;         // otherwise 1
  int parts;
  GemvEpilogue epilogue;
  GemvPart part[GemvParams::kMostParts];  // whose `first` counts quads

  constexpr bool of_experts() const {
    return expert_quads > 0 || turns > 1;
  }
};

// The router's choice, in shared memory.
struct PersistentRoute {
  unsigned experts[RouterParams::kMostChosen];
  float scores[RouterParams::kMostChosen];
  int choices;  // of routers, up to now
};

// Attention of a token: a block has a part of the keys of a unit, and then merges the parts of some columns.
struct PersistentAttention {
  TokenParams token;  // whose `rows` and `out` are in handoff memory
  int rows_from;      // the instruction that gives the rows
  int parts;
  float* partial;  // [unit][part][row][kPitch]: sums, a maximum and a sum of weights, handed over as results are

  static constexpr int kWidth = 128;     // the most values of a head
  static constexpr int kMostParts = 16;  // a lane for each: with more, merging takes longer than they save
  static constexpr int kPitch = kWidth + 4;
};

struct PersistentRouter {
  RouterParams params;
  int logits_from;  // the instruction that gives the logits
};

// Producer warps stream w through `slots` in shared memory, in the order of the instructions and whatever they wait for. A chunk
// is what a slot has: up to four quads, for the warps of a team. Teams take turns at the chunks.
//
// Results that a later instruction reads are handed over in global memory whose bits are all set before: a reader polls the
// counter of the instruction, which says that most of it is there, and then each value until it is set. No result is all ones:
// NaN is stored as another pattern.
struct PersistentParams {
  static constexpr int kMost = 40;  // instructions
  static constexpr int kMostAttentions = 10;
  static constexpr int kMostRouters = 8;
  static constexpr int kCounters = kMost + kMostAttentions;
  static constexpr int kMostTeams = 4;
  static constexpr int kTeamWarps = 4;
  static constexpr int kMostWarps = kMostTeams * kTeamWarps;
  static constexpr int kAttentionWarps = 4;
  static constexpr int kMatrices = 3;  // w, its scales and its biases: each has a producer warp
  static constexpr int kGroup = 64;
  static constexpr int kPairValues = 512;  // eight groups: two for each of the four slices of an MMA
  static constexpr int kQuadRows = 4;
  static constexpr int kMostInner = 32768;   // of x, which leaves space for some slots
  static constexpr int kTurnMultiple = 256;  // of inner: bulk copies of a quad's scales have a multiple of 16 bytes
  static constexpr int kMostSlots = 16;
  static constexpr int kSlotState = 48;      // bytes of a slot besides its memory
  static constexpr int kCounterBytes = 128;  // apart, so that polling one does not delay others
  static constexpr int kUnset = -1;

  int* arrived;   // [kCounters]: blocks that have finished each instruction, or each attention, counted from kUnset
  void* cleared;  // handoff memory of another kernel of the graph, which this one sets again
  int cleared_bytes;
  int slots;
  int slot_bytes;
  int most_inner;  // of x in shared memory: `padded` and all turns
  int count;
  int attentions;
  int attention_rows;  // of a unit, at most
  PersistentGemv gemv[kMost];
  PersistentAttention attention[kMostAttentions];
  PersistentRouter router[kMostRouters];

  // x has whole pairs of groups, also of each turn: the rest is 0.
  static constexpr int padded(int inner) {
    return (inner + kPairValues - 1) / kPairValues * kPairValues;
  }

  static constexpr int row_bytes(int values) {
    return values / 2;
  }
  static constexpr int scale_bytes(int values) {
    return values / kGroup * 2;
  }
  // Of a row of one of the matrices.
  static constexpr int matrix_bytes(int matrix, int values) {
    return matrix == 0 ? row_bytes(values) : scale_bytes(values);
  }
  static constexpr int slot_bytes_of(int rows, int values) {
    return rows * (row_bytes(values) + 2 * scale_bytes(values));
  }
  // x as integers of two digits, and a step and a sum of each group.
  static constexpr int x_bytes(int inner) {
    return inner * 2 + inner / kGroup * 8;
  }
  static constexpr int shares_bytes() {  // each with four numbers more
    return (kMost * (static_cast<int>(sizeof(PersistentGemv)) + 16) + 127) / 128 * 128;
  }
  static constexpr int attentions_bytes() {
    return (kMostAttentions * static_cast<int>(sizeof(PersistentAttention)) + 127) / 128 * 128;
  }
  // Of attention to so many rows: a block's part, and the results of its warps.
  static constexpr int attention_bytes(int rows) {
    return rows == 0 ? 0
                     : TokenTraits{PersistentAttention::kWidth}.part_bytes(kAttentionWarps) +
                           kAttentionWarps * rows * PersistentAttention::kPitch * 4;
  }
  static constexpr int sums_bytes() {
    return 2 * kMostWarps * kQuadRows * 4;
  }
  static constexpr int squares_bytes() {
    return kMostWarps * 4;
  }
  constexpr int shared_bytes() const {
    return slots * (slot_bytes + kSlotState) + shares_bytes() + attentions_bytes() + x_bytes(most_inner) +
           attention_bytes(attention_rows) + sums_bytes() + squares_bytes() + static_cast<int>(sizeof(PersistentRoute));
  }
};

// The warps of a kernel, and their registers: consumers in teams, those of attention, and producers. A warpgroup exchanges
// registers with others. The code for experts needs more of them, so that there are fewer consumers.
template <bool Experts>
struct PersistentShape {
  static constexpr int kTeams = Experts ? 3 : PersistentParams::kMostTeams;
  static constexpr int kWarps = kTeams * PersistentParams::kTeamWarps;
  static constexpr int kConsumers = kWarps * 32;
  static constexpr int kThreads = kConsumers + PersistentParams::kAttentionWarps * 32 + 128;
  static constexpr int kRegisters = Experts ? 96 : 80;  // that each begins with
  static constexpr int kConsumerRegisters = Experts ? 104 : kRegisters;
  static constexpr int kProducerRegisters = Experts ? 40 : 32;
  static constexpr int kAttentionRegisters = (kTeams + 2) * kRegisters - kTeams * kConsumerRegisters - kProducerRegisters;
};

}  // namespace mlx_cuda

// persistent_sm90.cu. EACH(name, dtype, whether experts are chosen).
#define MLX_CUDA_PERSISTENT_KERNELS(EACH)         \
  EACH(persistent_float16, float16, false)        \
  EACH(persistent_bfloat16, bfloat16, false)      \
  EACH(persistent_experts_float16, float16, true) \
  EACH(persistent_experts_bfloat16, bfloat16, true)
