// Tensor core products of 16-bit floats with float32 sums, and what feeds them (sm_80 and newer).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace mlx_cuda {

// c += a b, with a [16, 16] by rows and b [16, 8] by columns.
__device__ inline void mma(float (&c)[4], const uint4& a, unsigned b0, unsigned b1, __half) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
__device__ inline void mma(float (&c)[4], const uint4& a, unsigned b0, unsigned b1, __nv_bfloat16) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

__device__ inline unsigned pack(float low, float high, __half) {
  __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<unsigned*>(&pair);
}
__device__ inline unsigned pack(float low, float high, __nv_bfloat16) {
  __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<unsigned*>(&pair);
}

// 16 bytes that nobody writes meanwhile: kept in the L1 cache where several warps of a block share them.
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

__device__ inline unsigned word(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

__device__ inline float2 unpack(unsigned pair, __half) {
  return __half22float2(*reinterpret_cast<__half2*>(&pair));
}
__device__ inline float2 unpack(unsigned pair, __nv_bfloat16) {
  return __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&pair));
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

}  // namespace mlx_cuda
