// Warpgroup products of sm_90a: operands in shared memory (swizzled over 128 bytes, as the copy engine writes them) or registers,
// sums in registers. PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions".
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace mlx_cuda {

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
// Sums after the wait for their products: nothing that uses them may move in front of it.
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
