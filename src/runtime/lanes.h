// How many of our kernels may run at the same time.
//
// MLX's graphs have no edges but those of the data: calls that need nothing of each other, up to a hundred, are as many branches.
// To begin so many branches takes a device longer than short kernels run: a product of one row with 4-bit weights took 23 us in
// such a graph, and 13 where only a few may run at once (H200; two, four and 32 are alike). So kernels that fill the device and run
// for microseconds take a lane, whose kernels run one after another; a second lane is enough to hide the beginning of one kernel
// behind the end of another, and kernels too small to fill the device have room for some more.
#pragma once

#include <mlx/backend/cuda/device.h>

namespace mlx_cuda {

namespace mx = mlx::core;

// Puts the node that is added next into a lane; called like set_output_array, once everything is allocated.
void take_lane(mx::cu::CommandEncoder& encoder);

}  // namespace mlx_cuda
