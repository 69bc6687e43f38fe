// The sum over the GPUs of a group of processes by a kernel of ours, over memory that they reach of each other.
#pragma once

#include "all_sum/peers.h"

#include <mlx/array.h>
#include <mlx/distributed/distributed.h>
#include <mlx/stream.h>

#include <memory>
#include <optional>
#include <string>

namespace mlx_cuda {

// Why such a sum is not the kernel's; nothing where it is, as far as is known before memory has been asked for.
std::string all_sum_refusal(const mx::array& x, const mx::distributed::Group& group);

// The memory of a sum that the kernel takes, else null. The first call for a group and stream is collective.
std::shared_ptr<const Peers> peers_for(const mx::array& x, const mx::distributed::Group& group, const mx::Stream& stream);

// out = the sum of x, + added.
void encode_all_sum(
    const Peers& peers, const mx::array& x, const std::optional<mx::array>& added, mx::array& out, const mx::Stream& stream);

// As mx::distributed::all_sum; none where that is to do it. Collective as `peers_for`.
std::optional<mx::array> all_sum(const mx::array& x, const mx::distributed::Group& group, const mx::Stream& stream);

// Whether a primitive is such a sum, ours or MLX's, and of which group.
std::optional<mx::distributed::Group> group_of_sum(const mx::Primitive& primitive);

}  // namespace mlx_cuda
