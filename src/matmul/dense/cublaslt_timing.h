// Times algorithms of cuBLASLt for a problem, on operands of their own: the arrays of the graph are not computed yet when one is
// chosen.
#pragma once

#include "matmul/dense/cublaslt.h"

#include <functional>
#include <vector>

namespace mlx_cuda {

using Candidate = cublasLtMatmulHeuristicResult_t;
using RunCandidate = std::function<cublasStatus_t(const Candidate&, const MatmulPointers&, void* workspace, cudaStream_t)>;

// Runs the candidates in turn and returns the median time of each in microseconds, or infinity for one that failed; none without
// enough memory.
std::optional<std::vector<double>> time_candidates(
    const MatmulProblem& problem, const std::vector<Candidate>& candidates, const RunCandidate& run);

}  // namespace mlx_cuda
