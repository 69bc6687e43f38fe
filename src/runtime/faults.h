// Calls that fail because a test wants them to.
#pragma once

#include <string>

namespace mlx_cuda {

// Where: "kernel", "cublaslt", "cudnn" (a plan that is built, or run), "cudnn full" (no memory for a plan), "memory", "peers"
// (memory that other processes reach), "internals" (MLX is not inside what captures take it for) or "commit" (a primitive that is
// captured launches what was encoded before it). One call fails, after so many others of its kind; with -1 all fail, with -2 none.
// Returns whether one was still to fail.
bool inject_fault(const std::string& where, int after);

// Whether this call is to fail.
bool fault(const char* where);

}  // namespace mlx_cuda
