// Barriers in shared memory, the bulk tensor copy engine that signals them, and registers moved between warpgroups (sm_90a).
// PTX ISA, "mbarrier", "cp.async.bulk.tensor", "setmaxnreg".
#pragma once

namespace mlx_cuda {

using Barrier = unsigned long long;

// What the driver writes as CUtensorMap.
struct alignas(64) TensorMap {
  unsigned long long words[16];
};

__device__ inline unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

__device__ inline void barrier_init(Barrier* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
}
// Makes initialised barriers known to the copy engine.
__device__ inline void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void barrier_arrive(Barrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ inline void barrier_expect(Barrier* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}
// Waits until the phase of this parity is over.
__device__ inline void barrier_wait(Barrier* barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nwait:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra.uni over;\nbra.uni wait;\nover:\n}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// A box of a tensor of four dimensions, the innermost first; what lies outside of the tensor is zero.
__device__ inline void copy_box(void* shared, const TensorMap* map, Barrier* barrier, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(
          shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// Adjacent bytes, a multiple of 16 and on 16.
__device__ inline void copy_bytes(void* shared, const void* from, int bytes, Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(shared)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// Ordinary writes to shared memory become visible to products and copies that begin later.
__device__ inline void shared_writes_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Waits for `threads` threads of the block, whole warps, that use the same number (not 0, which is __syncthreads).
__device__ inline void sync_some(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Counts for those that wait there, without waiting itself.
__device__ inline void arrive_some(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

template <int Registers>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

}  // namespace mlx_cuda
