// All-reduce over the GPUs of a group of processes, by a kernel on peer memory.
#pragma once

#include "all_sum/peers.h"

#include <mlx/array.h>
#include <mlx/distributed/distributed.h>
#include <mlx/stream.h>

#include <memory>
#include <set>
#include <string>

namespace mlx_cuda {

// Why MLX computes such an all-reduce; empty if the kernel does, as far as is known without a collective call.
std::string all_sum_refusal(const mx::array& x, const mx::distributed::Group& group);

// As mx::distributed::all_sum; none where that is to do it. The first call for a group and stream is collective (peers.h).
MaybeArray all_sum(const mx::array& x, const mx::distributed::Group& group, const mx::Stream& stream);

// The memory that a primitive sums up by, if it is one of those.
std::shared_ptr<const Peers> peers_of_sum(const mx::Primitive& primitive);

// out = the sum of x, + added.
void encode_all_sum(const Peers& peers, const mx::array& x, const MaybeArray& added, mx::array& out, const mx::Stream& stream);

// Launches the work of a stream, and makes later all-reduces on it local: the result is x itself, until that is reverted. So a
// captured step, and its reference, run independently of the other processes. No effect without groups.
void leave_alone(const std::set<std::shared_ptr<const Peers>>& groups, bool alone, const mx::Stream& stream);

}  // namespace mlx_cuda
