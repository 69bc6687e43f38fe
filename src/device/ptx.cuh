// All inline assembly (PTX ISA): an instruction, or a few, under a name. Comments name instructions that need a newer GPU than
// sm_80.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace mlx_cuda {

using Barrier = unsigned long long;

// A CUtensorMap, as the driver encodes it.
struct alignas(64) TensorMap {
  unsigned long long words[16];
};

__device__ inline unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// ----------------------------------------------------------------------------------------------------------------------- numbers
// The larger of two numbers, or NaN where one is NaN. fmaxf gives the other one then: a clamp or a maximum by fmaxf makes finite
// results of NaN.
__device__ inline float nan_max(float a, float b) {
#if __CUDA_ARCH__ >= 800
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
#else
  return a > b || a != a ? a : b;
#endif
}

__device__ inline float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline unsigned to_tf32(float x) {
  unsigned y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}

// Two numbers as e4m3 (sm_89), the first in the lower byte: to nearest even, saturating, NaN to NaN.
__device__ inline unsigned to_fp8(float first, float second) {
  unsigned short both;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(second), "f"(first));
  return both;
}

// (value & mask) | base in one instruction, which takes one of the two constants only from a register.
template <unsigned Mask, unsigned Base>
__device__ inline unsigned raise(unsigned value) {
  unsigned base;
  asm("mov.b32 %0, %1;" : "=r"(base) : "n"(Base));
  unsigned raised;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(raised) : "r"(value), "n"(Mask), "r"(base));
  return raised;
}

// Keeps a number in its register: the compiler would read thread indices again in each iteration, which takes longer than a
// multiplication.
__device__ inline int kept(int value) {
  int same;
  asm volatile("mov.b32 %0, %1;" : "=r"(same) : "r"(value));
  return same;
}

// Makes the compiler compute the addresses of a row's mask for each tile: kept, they would take registers that the sums need.
__device__ inline void hide(int& row) {
  asm volatile("" : "+r"(row));
}

// ------------------------------------------------------------------------------------------------------------------------ memory
// 16 bytes that no thread writes during the kernel: cached in L1, if several warps of a block share them.
template <bool Shared>
__device__ inline uint4 load16(const void* pointer) {
  uint4 value;
  if (Shared) {
    asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(pointer));
  } else {
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(pointer));
  }
  return value;
}

// Packed words that are read once; `Kept` in the L1 cache if the loads of a warp share sectors.
template <bool Kept, int Words>
__device__ inline void stream(unsigned* to, const char* from) {
#define MLX_CUDA_STREAM(cache)                                                                                   \
  if constexpr (Words == 4) {                                                                                    \
    asm volatile("ld.global.nc" cache ".L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"                                    \
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])                                            \
                 : "l"(from));                                                                                   \
  } else if constexpr (Words == 2) {                                                                             \
    asm volatile("ld.global.nc" cache ".L2::128B.v2.u32 {%0,%1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(from)); \
  } else {                                                                                                       \
    asm volatile("ld.global.nc" cache ".L2::128B.u32 %0, [%1];" : "=r"(to[0]) : "l"(from));                      \
  }
  if constexpr (Kept) {
    MLX_CUDA_STREAM("")
  } else {
    MLX_CUDA_STREAM(".L1::no_allocate")
  }
#undef MLX_CUDA_STREAM
}

__device__ inline void prefetch(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

// 16 bytes at once, as other GPUs see them (sm_70).
__device__ inline void store_whole(void* to, uint4 letter) {
  const auto* half = reinterpret_cast<const unsigned long long*>(&letter);
  asm volatile("{\n\t.reg .b128 letter;\n\tmov.b128 letter, {%1, %2};\n\tst.relaxed.sys.global.b128 [%0], letter;\n\t}" ::"l"(to),
               "l"(half[0]), "l"(half[1])
               : "memory");
}

__device__ inline uint4 load_whole(const void* from) {
  ulonglong2 halves;
  asm volatile("{\n\t.reg .b128 letter;\n\tld.relaxed.sys.global.b128 letter, [%2];\n\tmov.b128 {%0, %1}, letter;\n\t}"
               : "=l"(halves.x), "=l"(halves.y)
               : "l"(from)
               : "memory");
  return reinterpret_cast<const uint4&>(halves);
}

__device__ inline uint4 load16_shared(unsigned address) {
  uint4 v;
  asm("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}
__device__ inline unsigned load4_shared(unsigned address) {
  unsigned word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address));
  return word;
}
__device__ inline float load_shared(unsigned address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
  return value;
}
__device__ inline void store_shared(unsigned address, unsigned value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// ------------------------------------------------------------------------------------------------------------------------ copies
// Asynchronous copies from global to shared memory (cp.async): the L2 cache reads whole lines of 128 bytes, and bytes out of
// bounds are zeros. `level`: cg bypasses the L1 cache, only for 16 bytes.
#define MLX_CUDA_COPY_ASYNC(level, hints, sizes, ...) \
  asm volatile("cp.async." level ".shared.global" hints " [%0], [%1], " sizes ";" ::__VA_ARGS__ : "memory")
template <int Bytes>
__device__ inline void copy_async(unsigned to, const void* from) {
  if constexpr (Bytes == 16) {
    MLX_CUDA_COPY_ASYNC("cg", ".L2::128B", "16", "r"(to), "l"(from));
  } else {
    MLX_CUDA_COPY_ASYNC("ca", ".L2::128B", "%2", "r"(to), "l"(from), "n"(Bytes));
  }
}
template <int Bytes>
__device__ inline void copy_async(unsigned to, const void* from, bool there) {
  if constexpr (Bytes == 16) {
    MLX_CUDA_COPY_ASYNC("cg", ".L2::128B", "16, %2", "r"(to), "l"(from), "r"(there ? 16 : 0));
  } else {
    MLX_CUDA_COPY_ASYNC("ca", ".L2::128B", "%2, %3", "r"(to), "l"(from), "n"(Bytes), "r"(there ? Bytes : 0));
  }
}
// The same without whole lines: 16 bytes, and any through the L1 cache.
__device__ inline void copy16_async(unsigned to, const void* from, bool there) {
  MLX_CUDA_COPY_ASYNC("cg", "", "16, %2", "r"(to), "l"(from), "r"(there ? 16 : 0));
}
template <int Bytes>
__device__ inline void copy_async_cached(void* to, const void* from) {
  MLX_CUDA_COPY_ASYNC("ca", "", "%2", "r"(shared_address(to)), "l"(from), "n"(Bytes));
}
// The L2 policy of data that is read once and evicted first, so that other data stays, and a copy with it.
__device__ inline unsigned long long evict_first() {
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ inline void copy16_once(void* to, const void* from, bool there) {
  const unsigned address = shared_address(to);
  MLX_CUDA_COPY_ASYNC(
      "cg", ".L2::cache_hint.L2::128B", "16, %2, %3", "r"(address), "l"(from), "r"(there ? 16 : 0), "l"(evict_first()));
}
__device__ inline void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int Pending>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// -------------------------------------------------------------------------------------------------------- tensor cores, by warps
// c += a b, with a [16, 16] by rows and b [16, 8] by columns; of float32, rounded to TF32, with [16, 8] and [8, 8].
#define MLX_CUDA_MMA(T, shape, type)                                                                                         \
  __device__ inline void mma(float (&c)[4], const uint4& a, unsigned b0, unsigned b1, T) {                                   \
    asm("mma.sync.aligned." shape ".row.col.f32." type "." type ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                                     \
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));                                                         \
  }
MLX_CUDA_MMA(__half, "m16n8k16", "f16")
MLX_CUDA_MMA(__nv_bfloat16, "m16n8k16", "bf16")
MLX_CUDA_MMA(float, "m16n8k8", "tf32")

// Of bytes, those of a without a sign, with [16, 32] and [32, 8].
__device__ inline void multiply_bytes(int (&c)[4], const uint4& a, unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// Four matrices of 8 rows of 16 bytes; lanes 8 m to 8 m + 7 give the rows of matrix m.
#define MLX_CUDA_LOAD_MATRICES(name, trans)                                               \
  __device__ inline uint4 name(unsigned address) {                                        \
    uint4 v;                                                                              \
    asm volatile("ldmatrix.sync.aligned.m8n8.x4" trans ".shared.b16 {%0,%1,%2,%3}, [%4];" \
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)                             \
                 : "r"(address));                                                         \
    return v;                                                                             \
  }
MLX_CUDA_LOAD_MATRICES(load_matrices, "")
MLX_CUDA_LOAD_MATRICES(load_matrices_transposed, ".trans")

// An 8 by 8 matrix of 16-bit numbers, two adjacent ones of a row in each lane.
__device__ inline unsigned transposed(unsigned pair) {
  unsigned out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
  return out;
}

// -------------------------------------------- kernels that begin before others have ended (sm_90, programmatic dependent launch)
// Lets the kernels that wait for this one begin as soon as all of its blocks have.
__device__ inline void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Returns when all that this kernel depends on is done and its results can be read.
__device__ inline void wait_for_grids() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// For kernels that have nothing to do before that.
__device__ inline void begin_pdl() {
  launch_dependents();
  wait_for_grids();
}

// -------------------------------------------------------------------------------------------------------------- clusters (sm_90)
// All blocks of a cluster: writes to each other's memory are visible after both.
__device__ inline void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ inline void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The same address in another block of the cluster.
__device__ inline unsigned address_in(int part, const void* mine) {
  unsigned address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(address)
      : "r"(static_cast<unsigned>(__cvta_generic_to_shared(mine))), "r"(part));
  return address;
}
__device__ inline const float* in_cluster(int part, const float* mine) {
  unsigned long long address;
  asm("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(mine), "r"(part));
  return reinterpret_cast<const float*>(address);
}
__device__ inline void store_in_cluster(unsigned to, float x, float y) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(x), "f"(y) : "memory");
}
__device__ inline void store_in_cluster(unsigned to, float x, float y, float z, float w) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}

// ------------------------------------------- barriers in shared memory, and the bulk copy engine (TMA) that signals them (sm_90)
__device__ inline void barrier_init(Barrier* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
}
// Makes initialized barriers visible to TMA.
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

// A box of a tensor of four dimensions, the innermost first; outside of the tensor it is zero.
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

// A box of a tensor, which leaves the L2 cache first: keys and values are read once.
__device__ inline void copy_box_once(
    void* shared, const TensorMap* map, Barrier* barrier, unsigned long long once, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], "
      "[%2], "
      "%7;" ::"r"(shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(once)
      : "memory");
}

// Makes ordinary writes to shared memory visible to later wgmma and TMA instructions.
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

// ---------------------------------------------------------------------------------------------------- wgmma (warpgroups, sm_90a)
// Operands in shared memory (128-byte swizzle, as TMA writes them) or registers, accumulators in registers.

// Rows of 128 bytes in groups of 8. `leading` is the distance in bytes between blocks of 64 columns of a matrix whose columns are
// adjacent in memory although it is read by rows (V); it does not matter otherwise.
__device__ inline unsigned long long descriptor(const void* shared, int leading = 16) {
  const auto address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  constexpr unsigned long long kSwizzle128 = 1ull << 62;
  constexpr unsigned long long kGroup = 1024;
  return kSwizzle128 | kGroup / 16 << 32 | static_cast<unsigned long long>(leading / 16) << 16 | (address & 0x3ffff) >> 4;
}

__device__ inline void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ inline void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most Pending groups are under way.
template <int Pending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}
// Accumulators after the wait for wgmma: their uses may not move before it.
template <int Count>
__device__ inline void wgmma_results(float (&d)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) {
    asm volatile("" : "+f"(d[i])::"memory");
  }
}

#define MLX_CUDA_R0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define MLX_CUDA_R1 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define MLX_CUDA_R2 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define MLX_CUDA_R3 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define MLX_CUDA_R4 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define MLX_CUDA_R5 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define MLX_CUDA_R6 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define MLX_CUDA_R7 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define MLX_CUDA_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define MLX_CUDA_D16(i) MLX_CUDA_D4(i), MLX_CUDA_D4(i + 4), MLX_CUDA_D4(i + 8), MLX_CUDA_D4(i + 12)
#define MLX_CUDA_REGISTERS_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define MLX_CUDA_REGISTERS_32 MLX_CUDA_R0
#define MLX_CUDA_REGISTERS_64 MLX_CUDA_R0 ", " MLX_CUDA_R1
#define MLX_CUDA_REGISTERS_96 MLX_CUDA_REGISTERS_64 ", " MLX_CUDA_R2
#define MLX_CUDA_REGISTERS_128 MLX_CUDA_REGISTERS_96 ", " MLX_CUDA_R3
#define MLX_CUDA_REGISTERS_192 MLX_CUDA_REGISTERS_128 ", " MLX_CUDA_R4 ", " MLX_CUDA_R5
#define MLX_CUDA_REGISTERS_256 MLX_CUDA_REGISTERS_192 ", " MLX_CUDA_R6 ", " MLX_CUDA_R7
#define MLX_CUDA_OPERANDS_16 MLX_CUDA_D4(0), MLX_CUDA_D4(4)
#define MLX_CUDA_OPERANDS_32 MLX_CUDA_D16(0)
#define MLX_CUDA_OPERANDS_64 MLX_CUDA_D16(0), MLX_CUDA_D16(16)
#define MLX_CUDA_OPERANDS_96 MLX_CUDA_OPERANDS_64, MLX_CUDA_D16(32)
#define MLX_CUDA_OPERANDS_128 MLX_CUDA_OPERANDS_96, MLX_CUDA_D16(48)
#define MLX_CUDA_OPERANDS_192 MLX_CUDA_OPERANDS_128, MLX_CUDA_D16(64), MLX_CUDA_D16(80)
#define MLX_CUDA_OPERANDS_256 MLX_CUDA_OPERANDS_192, MLX_CUDA_D16(96), MLX_CUDA_D16(112)

// wgmma_shared: d = a b or, with `add`, d += a b; a [64, 16] and b [16, N], each K-major (its 16 adjacent) or, as PTX says it,
// transposed (its 64 or N adjacent).
// wgmma_registers: d += a b; a in registers, b as above.
#define MLX_CUDA_WGMMA(N, T, type, I0, I1, I2, I3, I4, I5)                                                         \
  template <int TransA = 0, int TransB = 0>                                                                        \
  __device__ inline void wgmma_shared(float (&d)[N / 2], unsigned long long a, unsigned long long b, int add, T) { \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #I2                                                      \
                 ", 0;\n"                                                                                          \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type "." type " {" MLX_CUDA_REGISTERS_##N       \
                 "}, %" #I0 ", %" #I1 ", add, 1, 1, %" #I3 ", %" #I4 ";\n}"                                        \
                 : MLX_CUDA_OPERANDS_##N                                                                           \
                 : "l"(a), "l"(b), "r"(add), "n"(TransA), "n"(TransB));                                            \
  }                                                                                                                \
  template <int TransB = 1>                                                                                        \
  __device__ inline void wgmma_registers(float (&d)[N / 2], const unsigned (&a)[4], unsigned long long b, T) {     \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type "." type " {" MLX_CUDA_REGISTERS_##N       \
                 "}, {%" #I0 ", %" #I1 ", %" #I2 ", %" #I3 "}, %" #I4 ", 1, 1, 1, %" #I5 ";"                       \
                 : MLX_CUDA_OPERANDS_##N                                                                           \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(TransB));                               \
  }
#define MLX_CUDA_WGMMA_BOTH(N, ...)             \
  MLX_CUDA_WGMMA(N, __half, "f16", __VA_ARGS__) \
  MLX_CUDA_WGMMA(N, __nv_bfloat16, "bf16", __VA_ARGS__)

MLX_CUDA_WGMMA_BOTH(16, 8, 9, 10, 11, 12, 13)
MLX_CUDA_WGMMA_BOTH(32, 16, 17, 18, 19, 20, 21)
MLX_CUDA_WGMMA_BOTH(64, 32, 33, 34, 35, 36, 37)
MLX_CUDA_WGMMA_BOTH(96, 48, 49, 50, 51, 52, 53)
MLX_CUDA_WGMMA_BOTH(128, 64, 65, 66, 67, 68, 69)
MLX_CUDA_WGMMA_BOTH(192, 96, 97, 98, 99, 100, 101)
MLX_CUDA_WGMMA_BOTH(256, 128, 129, 130, 131, 132, 133)

}  // namespace mlx_cuda
