// GEMVs of a decode step, several in one kernel, fused with the operations before and after them.
#pragma once

#include "matmul/gemv/params.h"
#include "matmul/quantized/weights.h"
#include "runtime/arrays.h"

#include <mlx/stream.h>

#include <optional>
#include <string>
#include <vector>

namespace mlx_cuda {

// x @ w^T by a primitive, as the kernel takes it.
struct OneGemv {
  mx::array x;
  mx::array out;
  mx::array w;  // [columns, inner], or quantized
  std::optional<QuantizedForm> form{};
  MaybeArray scales{};
  MaybeArray biases{};
  int columns = 0;
  int inner = 0;
  MaybeArray chosen{};  // of MoE, whose matrices w is [experts, columns, inner]: uint32 [count]

  // The number of pairs of a row and a matrix; all experts may have the same row.
  int count() const {
    return chosen ? static_cast<int>(chosen->size()) : 1;
  }
  bool each_its_row() const {
    return chosen && x.size() != static_cast<std::size_t>(inner);
  }
  bool same_kind(const OneGemv& other) const {
    return form == other.form && inner == other.inner && out.dtype() == other.out.dtype() && !chosen == !other.chosen &&
           (!chosen || (chosen->id() == other.chosen->id() && columns == other.columns));
  }
};

// That of the primitive that gives `out`; none where the kernel does not take it.
std::optional<OneGemv> gemv_of(const mx::array& out);

// The computation of the kernel, with arrays instead of addresses.
struct GemvCall {
  mx::array x;  // [rows, inner], before the norm
  MaybeArray norm{};
  float eps = 0;
  std::vector<OneGemv> parts;
  GemvEpilogue epilogue = GemvEpilogue::none;
  MaybeArray added{};
  MaybeArray factors{};  // of MoE with a row for each expert: the factors of their results before they are summed
  Arrays outputs;        // of the parts, or the one of the epilogue

  Arrays inputs() const;
  std::string name() const;
};

// Adds the kernel to the stream's encoder.
void launch(const GemvCall& call, const mx::Stream& stream);

}  // namespace mlx_cuda
