// The runs of a plan that a persistent kernel computes.
#pragma once

#include "decoding/persistent/persistent.h"

#include <optional>
#include <vector>

namespace mlx_cuda {

// A GEMV, and what is computed before it.
struct Instruction {
  GemvCall gemv;
  std::optional<RouterCall> router{};
  std::optional<TokenCall> token{};

  Arrays inputs() const;
  Arrays outputs() const;
};

using Run = std::vector<Instruction>;

// Which result of which instruction.
struct Giver {
  int instruction;
  int output;
};

// Which of the first instructions gives an array; none where none does.
std::optional<Giver> giver(const Run& run, const mx::array& of, std::size_t before);

// How often it computes what, such as "10 norm + 3 GEMVs; 9 rope + append + attention".
std::string name_of(const Run& run);

// Whether a later instruction reads a result of one.
bool is_read(const Run& run, std::size_t instruction);

// Whether an instruction has the x of the one before, normalized alike.
bool same_x(const Run& run, std::size_t instruction);

// Whether the kernel with a router is needed, or the one that is faster without it.
bool with_experts(const Run& run);

// How an instruction's weights are divided among slots and warps.
struct Division {
  int split_shift;
  int slot_values;

  int quads() const;  // of a slot
  int slot_bytes() const;
};
Division divide(const OneGemv& gemv);

// How many parts the keys of a token are divided in.
int parts_of(const TokenCall& token);

// The runs that follow one another, of two to so many instructions.
std::vector<Run> runs_of(const Plan& plan, const PersistentCalls& calls, std::size_t most);

}  // namespace mlx_cuda
