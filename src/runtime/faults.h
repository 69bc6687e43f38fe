// Calls that fail because a test wants them to.
#pragma once

#include <string>

namespace mlx_cuda {

// Where: "kernel", "cublaslt", "cudnn" or "memory".
void inject_fault(const std::string& where, int after);

// Whether this call is the one that fails: once, after so many others of the same kind.
bool fault(const char* where);

}  // namespace mlx_cuda
