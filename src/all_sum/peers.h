// Memory of each GPU of a group of processes that the others write to, over NVLink or PCIe.
#pragma once

#include "runtime/arrays.h"

#include <mlx/distributed/distributed.h>
#include <mlx/stream.h>

#include <array>
#include <cstddef>
#include <memory>

namespace mlx_cuda {

struct Peers {
  // Processes of a group, each with memory of its own. All blocks of their kernels are resident at once: otherwise two GPUs, each
  // full of the blocks of another stream, would wait for each other.
  static constexpr int kMost = 8;
  static constexpr int kMostStreams = 2;

  int rank;
  int count;
  int capability;  // compute capability, and multiprocessors, of all of the GPUs
  int multiprocessors;
  std::array<void*, kMost> memory;  // of each process, as this one's GPU addresses it: zeros at first
  mx::array turn;                   // never read: each call names it as written, which puts calls in order
};

// So many bytes of each process of a group, for the work of one stream. The first call is collective: all processes make it. It
// returns none on all of them if there are too many processes or streams, if they are on several machines or different kinds of
// GPUs, or if a GPU cannot reach another or is out of memory. The memory stays until the process ends, as others may still write
// to it.
std::shared_ptr<const Peers> peers_of(const mx::distributed::Group& group, std::size_t bytes, const mx::Stream& stream);

// Has each GPU that this process sees reach what MLX allocates on the others, where the hardware can: without, arrays of one cannot
// be read on another, nor memory that one has freed be handed to it.
void share_memory();

}  // namespace mlx_cuda
