// A call of attention: its arrays and its options.
#pragma once

#include "runtime/arrays.h"

#include <mlx/stream.h>

#include <array>

namespace mlx_cuda {

// Which keys a query sees, how its scores become weights, and which results are needed.
struct AttentionOptions {
  float scale = 1;             // > 0
  float softcap = 0;           // 0: none
  int window_left = -1;        // keys before the diagonal; negative: all
  int window_right = -1;       // keys after it; negative: all; 0 is causal
  bool lse = false;            // also the log-sum-exp, float32 [B, H, Tq]
  bool deterministic = false;  // gradients have the same bits each time

  bool operator==(const AttentionOptions&) const = default;

  AttentionOptions with_lse(bool wanted) const {
    AttentionOptions same = *this;
    same.lse = wanted;
    return same;
  }
};

struct AttentionArrays {
  mx::array q;          // [B, H, Tq, D]
  mx::array k;          // [B, Hkv, Tk, D]
  mx::array v;          // [B, Hkv, Tk, Dv]
  MaybeArray table{};   // int32 [B, n]: k and v are pages (decode/primitive.h)
  MaybeArray mask{};    // bool or of q's dtype, with the shape [B, H, Tq, Tk] (broadcast views are read in place)
  MaybeArray starts{};  // int32 [B]: the first key of each batch entry
  MaybeArray ends{};    // int32 [B]: the key after its last; queries are the last ones before it
  MaybeArray sinks{};   // of q's dtype [H]
};

// Those that there may be, in the order of a primitive's inputs.
inline constexpr std::array kOptionalArrays{
    &AttentionArrays::table, &AttentionArrays::mask, &AttentionArrays::starts, &AttentionArrays::ends, &AttentionArrays::sinks};

}  // namespace mlx_cuda
