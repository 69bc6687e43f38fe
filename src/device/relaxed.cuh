// Inline assembly of kernels whose blocks exchange results while they run (sm_70), of their integers (sm_61), and of the weights
// that they stream (sm_90).
#pragma once

#include "device/ptx.cuh"

namespace mlx_cuda {

// Of memory that other blocks write or read meanwhile: each word whole, in no order with others.
__device__ inline unsigned load_relaxed(const void* from) {
  unsigned value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
__device__ inline unsigned short load2_relaxed(const void* from) {
  unsigned short value;
  asm volatile("ld.relaxed.gpu.global.u16 %0, [%1];" : "=h"(value) : "l"(from) : "memory");
  return value;
}
__device__ inline uint4 load16_relaxed(const void* from) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}
__device__ inline void store_relaxed(void* to, unsigned value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
__device__ inline void store16_relaxed(void* to, const float4& v) {
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}
__device__ inline void add_relaxed(int* to, int value) {
  asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

// Of shared memory. A thread that loads what another thread of the block has stored also sees what that thread wrote before.
__device__ inline int load_acquire(const int* from) {
  int value;
  asm volatile("ld.acquire.cta.shared.s32 %0, [%1];" : "=r"(value) : "r"(shared_address(from)) : "memory");
  return value;
}
__device__ inline void store_release(int* to, int value) {
  asm volatile("st.release.cta.shared.s32 [%0], %1;" ::"r"(shared_address(to)), "r"(value) : "memory");
}

// An optimization barrier: the same value, of which the compiler knows nothing. So it cannot compute earlier what depends on it,
// and keep that in registers.
__device__ inline int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// The dot product of four unsigned and four signed bytes, plus a sum.
__device__ inline int dot_bytes(unsigned one, unsigned other, int sum) {
  asm("dp4a.u32.s32 %0, %1, %2, %0;" : "+r"(sum) : "r"(one), "r"(other));
  return sum;
}

// Of shared memory, in order with barriers. Written out, as the compiler splits vectors that are members.
__device__ inline unsigned load2_in_order(unsigned address) {
  unsigned short v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address));
  return v;
}
__device__ inline uint2 load8_in_order(unsigned address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
  return v;
}
__device__ inline uint4 load16_in_order(unsigned address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}

// Adjacent bytes, as copy_bytes, that leave the L2 cache first.
__device__ inline void copy_bytes_once(void* shared, const void* from, int bytes, Barrier* barrier, unsigned long long once) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
                   shared_address(shared)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(once)
               : "memory");
}

}  // namespace mlx_cuda
