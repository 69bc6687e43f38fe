#include "all_sum/peers.h"

#include "runtime/device_code.h"
#include "runtime/faults.h"
#include "runtime/status.h"

#include <cuda.h>
#include <mlx/array.h>
#include <mlx/backend/cuda/device.h>
#include <mlx/distributed/distributed_impl.h>
#include <mlx/distributed/ops.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

namespace mlx_cuda {

namespace {

// What a process tells the others of its memory.
struct Offer {
  CUipcMemHandle handle{};
  char machine[40]{};
  int capability = 0;
  char there = 0;
  char full = 0;  // there was no memory
};

// A number that Linux draws when it starts; nothing elsewhere.
std::string machine() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return id;
}

Offer offer(CUdeviceptr& memory, std::size_t bytes) {
  Offer own;
  own.capability = compute_capability();
  const std::string id = machine();
  if (id.empty() || fault("peers")) {
    return own;
  }
  const CUresult made = cuMemAlloc(&memory, bytes);
  own.full = made == CUDA_ERROR_OUT_OF_MEMORY;
  // Where the memory is set is no stream of MLX's, which would not wait for it.
  if (succeeded(made) && succeeded(cuMemsetD8(memory, 0, bytes)) && succeeded(cuCtxSynchronize()) &&
      succeeded(cuIpcGetMemHandle(&own.handle, memory))) {
    std::memcpy(own.machine, id.data(), std::min(id.size(), sizeof own.machine));
    own.there = 1;
  }
  return own;
}

bool of_one_kind(const Offer& one, const Offer& other) {
  return one.there && other.there && one.capability == other.capability &&
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

// None where it is to be tried again.
std::optional<std::shared_ptr<const Peers>> make(const mx::distributed::Group& group, std::size_t bytes, const mx::Stream& stream) {
  Peers peers{group.rank(), group.size(), compute_capability(), {}, mx::array(0)};
  CUdeviceptr memory = 0;
  const Offer own = offer(memory, bytes);
  const mx::Shape shape{1, static_cast<int>(sizeof own)};
  mx::array all =
      mx::distributed::all_gather(mx::array(reinterpret_cast<const std::uint8_t*>(&own), shape, mx::uint8), group, stream);
  all.eval();
  std::array<Offer, Peers::kMost> offers;
  std::memcpy(offers.data(), all.data<std::uint8_t>(), peers.count * sizeof own);
  const bool opened = open(peers, offers.data(), memory);
  // Nobody writes before everybody's memory is there, and everybody knows whether it is.
  mx::array agreed = mx::distributed::all_min(mx::array(opened ? 1 : 0, mx::int32), group, stream);
  if (agreed.item<int>() == 1) {
    return std::make_shared<const Peers>(peers);
  }
  close(peers);
  mx::distributed::all_min(mx::array(0, mx::int32), group, stream).eval();  // nobody has it open any more
  cuMemFree(memory);
  const bool full = std::any_of(offers.begin(), offers.begin() + peers.count, [](const Offer& each) { return each.full != 0; });
  return full ? std::nullopt : std::optional(std::shared_ptr<const Peers>());
}

struct Made {
  std::weak_ptr<mx::distributed::detail::GroupImpl> group;
  std::shared_ptr<const Peers> peers;
};

}  // namespace

std::shared_ptr<const Peers> peers_of(const mx::distributed::Group& group, std::size_t bytes, const mx::Stream& stream) {
  static std::mutex mutex;
  static auto& all = *new std::map<std::pair<const void*, int>, Made>;
  const std::pair<const void*, int> key(group.raw_group().get(), stream.index);
  const std::lock_guard lock(mutex);
  if (const auto found = all.find(key); found != all.end() && found->second.group.lock() == group.raw_group()) {
    return found->second.peers;
  }
  if (group.size() > Peers::kMost) {
    return nullptr;
  }
  mx::cu::get_command_encoder(stream).device().make_current();
  const auto made = make(group, bytes, stream);
  if (made) {
    all.insert_or_assign(key, Made{group.raw_group(), *made});
  }
  return made.value_or(nullptr);
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
        cuMemPoolSetAccess(pool, &access, 1);  // without, it stays as it is without this package
      }
    }
  }
}

}  // namespace mlx_cuda
