#include "all_sum/peers.h"

#include "runtime/device_code.h"
#include "runtime/faults.h"
#include "runtime/status.h"

#include <cuda.h>
#include <mlx/array.h>
#include <mlx/backend/cuda/device.h>
#include <mlx/distributed/distributed_impl.h>
#include <mlx/distributed/ops.h>
#include <mlx/memory.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <string>

namespace mlx_cuda {

namespace {

// The description of a process's memory that the other processes get.
struct Offer {
  CUipcMemHandle handle{};
  char machine[40]{};
  int capability = 0;
  int multiprocessors = 0;
  char there = 0;
};

// A random number that Linux draws at boot; none elsewhere.
std::string machine() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return id;
}

bool allocate(CUdeviceptr& memory, std::size_t bytes) {
  if (succeeded(cuMemAlloc(&memory, bytes))) {
    return true;
  }
  mx::clear_cache();
  return succeeded(cuMemAlloc(&memory, bytes));
}

Offer offer(CUdeviceptr& memory, std::size_t bytes) {
  Offer own;
  own.capability = compute_capability();
  own.multiprocessors = multiprocessors();
  const std::string id = machine();
  // Where the memory is set is no stream of MLX's, which would not wait for it.
  if (!id.empty() && !fault("peers") && allocate(memory, bytes) && succeeded(cuMemsetD8(memory, 0, bytes)) &&
      succeeded(cuCtxSynchronize()) && succeeded(cuIpcGetMemHandle(&own.handle, memory))) {
    std::memcpy(own.machine, id.data(), std::min(id.size(), sizeof own.machine));
    own.there = 1;
  }
  return own;
}

bool of_one_kind(const Offer& one, const Offer& other) {
  return one.there && other.there && one.capability == other.capability && one.multiprocessors == other.multiprocessors &&
         std::memcmp(one.machine, other.machine, sizeof one.machine) == 0;
}

bool open(Peers& peers, const Offer* offers, CUdeviceptr own) {
  for (int i = 0; i < peers.count; ++i) {
    CUdeviceptr address = own;
    if (!of_one_kind(offers[i], offers[peers.rank]) ||
        (i != peers.rank && !succeeded(cuIpcOpenMemHandle(&address, offers[i].handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)))) {
      return false;
    }
    peers.memory[i] = reinterpret_cast<void*>(address);
  }
  return true;
}

void close(const Peers& peers) {
  for (int i = 0; i < peers.count; ++i) {
    if (i != peers.rank && peers.memory[i]) {
      cuIpcCloseMemHandle(reinterpret_cast<CUdeviceptr>(peers.memory[i]));
    }
  }
}

std::shared_ptr<const Peers> make(const mx::distributed::Group& group, std::size_t bytes, const mx::Stream& stream) {
  mx::cu::get_command_encoder(stream).device().make_current();
  Peers peers{group.rank(), group.size(), compute_capability(), multiprocessors(), {}, mx::array(0)};
  CUdeviceptr memory = 0;
  const Offer own = offer(memory, bytes);
  const mx::Shape shape{1, static_cast<int>(sizeof own)};
  mx::array all =
      mx::distributed::all_gather(mx::array(reinterpret_cast<const std::uint8_t*>(&own), shape, mx::uint8), group, stream);
  all.eval();
  std::array<Offer, Peers::kMost> offers;
  std::memcpy(offers.data(), all.data<std::uint8_t>(), peers.count * sizeof own);
  const bool opened = open(peers, offers.data(), memory);
  // No process writes before the memory of all exists, and all processes know whether it does.
  mx::array agreed = mx::distributed::all_min(mx::array(opened ? 1 : 0, mx::int32), group, stream);
  if (agreed.item<int>() == 1) {
    return std::make_shared<const Peers>(peers);
  }
  close(peers);
  mx::distributed::all_min(mx::array(0, mx::int32), group, stream).eval();  // no process has it open any more
  cuMemFree(memory);
  return nullptr;
}

struct Made {
  std::weak_ptr<mx::distributed::detail::GroupImpl> group;
  std::map<int, std::shared_ptr<const Peers>> of_streams;  // by their indices
};

}  // namespace

std::shared_ptr<const Peers> peers_of(const mx::distributed::Group& group, std::size_t bytes, const mx::Stream& stream) {
  static std::mutex mutex;
  static auto& all = *new std::map<const void*, Made>;
  const auto found = [&](const auto& use) {
    const std::lock_guard lock(mutex);
    Made& made = all[group.raw_group().get()];
    if (made.group.lock() != group.raw_group()) {  // another one was there before
      made = {group.raw_group(), {}};
    }
    return use(made.of_streams);
  };
  std::shared_ptr<const Peers> known;
  const bool asks = found([&](auto& of_streams) {
    const auto at = of_streams.find(stream.index);
    known = at == of_streams.end() ? nullptr : at->second;
    return at == of_streams.end() && of_streams.size() < Peers::kMostStreams;
  });
  if (asks) {  // a stream belongs to one thread, so no other thread creates the same one meanwhile
    known = make(group, bytes, stream);
    found([&](auto& of_streams) { return of_streams.insert_or_assign(stream.index, known).second; });
  }
  return known;
}

void share_memory() {
  int count = 0;
  MLX_CUDA_CHECK(cuDeviceGetCount(&count));
  for (CUdevice owner = 0; owner < count; ++owner) {
    CUmemoryPool pool = nullptr;
    if (!succeeded(cuDeviceGetDefaultMemPool(&pool, owner))) {
      continue;
    }
    for (CUdevice other = 0; other < count; ++other) {
      int reaches = 0;
      if (other != owner && succeeded(cuDeviceCanAccessPeer(&reaches, other, owner)) && reaches) {
        const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, other}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
        cuMemPoolSetAccess(pool, &access, 1);  // if this fails, MLX's pool stays unchanged
      }
    }
  }
}

}  // namespace mlx_cuda
