// How long algorithms of cuBLASLt take for a problem, on operands of their own: what the arrays of the graph will hold is not
// computed yet when one is chosen.
#pragma once

#include "matmul/dense/cublaslt.h"

#include <functional>
#include <vector>

namespace mlx_cuda {

using Candidate = cublasLtMatmulHeuristicResult_t;
using RunCandidate = std::function<cublasStatus_t(const Candidate&, const MatmulPointers&, void* workspace, cudaStream_t)>;

// Runs the candidates in turn and returns the median time of each in microseconds, or infinity for one that failed; none where
// memory is short.
std::optional<std::vector<double>> time_candidates(
    const MatmulProblem& problem, const std::vector<Candidate>& candidates, const RunCandidate& run);

}  // namespace mlx_cuda
