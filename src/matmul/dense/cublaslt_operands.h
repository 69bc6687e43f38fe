// Operands to time a product with: what the arrays of the graph will hold is not computed yet when its algorithm is chosen.
#pragma once

#include "matmul/dense/cublaslt.h"
#include "matmul/dense/cublaslt_tuning.h"

#include <optional>

namespace mlx_cuda {

class TuningOperands {
 public:
  explicit TuningOperands(const MatmulProblem& problem);

  // Filled with noise, on the stream; none where memory is short.
  std::optional<MatmulPointers> pointers(CUstream stream) const;

  // The bytes that one product reads and writes.
  std::size_t traffic() const;

 private:
  // One operand, of `count` numbers.
  struct Part {
    Part(mx::Dtype type, std::int64_t numbers);

    mx::Dtype dtype;
    std::int64_t count;
    TuningMemory memory;
  };

  MatmulProblem problem_;
  Part x_, w_, out_, bias_, inside_, scales_;
};

}  // namespace mlx_cuda
