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
  static constexpr int kMost = 8;  // processes
  // Of a group, each with memory of its own. All blocks of their kernels are resident at once: else two GPUs, each full of those of
  // another stream, would wait for each other.
  static constexpr int kMostStreams = 2;

  int rank;
  int count;
  int capability;  // compute capability, and multiprocessors, of all of the GPUs
  int multiprocessors;
  std::array<void*, kMost> memory;  // of each process, as this one's GPU addresses it: zeros at first
  mx::array turn;                   // that nobody reads: what uses the memory says that it writes it, and so takes turns
};

// So many bytes of each process of a group, for what runs on a stream. The first call is a collective one: all processes make it.
// It gives none to any of them where they or the streams are too many, they are on several machines, their GPUs are of several
// kinds, or one cannot reach another or is full. What was made stays until the process ends, as others may still write to it.
std::shared_ptr<const Peers> peers_of(const mx::distributed::Group& group, std::size_t bytes, const mx::Stream& stream);

// Has each GPU that this process sees reach what MLX allocates on the others, where the hardware can: without, arrays of one cannot
// be read on another, nor memory that one has freed be handed to it.
void share_memory();

}  // namespace mlx_cuda
