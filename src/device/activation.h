// The activations of a linear layer, for host and device code.
#pragma once

namespace mlx_cuda {

enum class Activation : int { none, relu, gelu_approx };

}  // namespace mlx_cuda
