// Fills memory with pseudorandom numbers from -1 to 1: a GEMM is faster on zeros than on data.
#include "device/vector.cuh"
#include "elementwise/noise.h"

extern "C" __global__ void __launch_bounds__(256) noise(void* data, long long count, mlx_cuda::NoiseType type) {
  using mlx_cuda::NoiseType;
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    unsigned bits = static_cast<unsigned>(i) * 2654435761u + static_cast<unsigned>(i >> 32);
    bits = (bits ^ bits >> 15) * 2246822519u;
    bits = (bits ^ bits >> 13) * 3266489917u;
    bits ^= bits >> 16;
    const float x = static_cast<float>(static_cast<int>(bits)) * 0x1p-31f;
    switch (type) {
      case NoiseType::float32:
        static_cast<float*>(data)[i] = x;
        break;
      case NoiseType::float16:
        static_cast<__half*>(data)[i] = mlx_cuda::from_float<__half>(x);
        break;
      case NoiseType::bfloat16:
        static_cast<__nv_bfloat16*>(data)[i] = mlx_cuda::from_float<__nv_bfloat16>(x);
        break;
      case NoiseType::fp8:  // e4m3 codes up to that of 1
        static_cast<unsigned char*>(data)[i] = static_cast<unsigned char>((bits & 0x80) | (bits >> 8) % 0x39);
        break;
    }
  }
}
