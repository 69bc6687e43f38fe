// A ring of two stages between a producer and two consumer warpgroups, as in Hopper's grouped kernels, and nothing else: whether
// racecheck comes to the end of such a kernel.
//
//     nvcc -gencode arch=compute_90a,code=sm_90a -o ring tests/gpu/ring.cu
//     compute-sanitizer --tool racecheck ring 0 64 3
//
// The arguments are a variant (1: filled by the bulk copy engine; 2: registers are moved between warpgroups; 3: both), how many
// tiles go through the ring, and launches. Each says whether its sums are right.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
__device__ inline uint32_t at(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ inline void wait(uint64_t* bar, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\nagain%=:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra done%=;\nbra "
      "again%=;\ndone%=:\n}" ::"r"(at(bar)),
      "r"(parity)
      : "memory");
}
__device__ inline void arrive(uint64_t* bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at(bar)) : "memory");
}
template <int Bulk, int Registers>
__global__ void __launch_bounds__(384, 1) ring(const float* in, float* out, int tiles) {
  __shared__ alignas(128) float data[2][1024];
  __shared__ alignas(8) uint64_t full[2], empty[2];
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at(&full[i])), "r"(Bulk ? 1 : 128));
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at(&empty[i])), "r"(256));
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    if constexpr (Registers)
      asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    for (int t = 0; t < tiles; ++t) {
      const int s = t % 2;
      const float* from = in + (t % 64) * 1024;
      if (Bulk) {
        if (threadIdx.x == 0) {
          wait(&empty[s], (t / 2 & 1) ^ 1);
          asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at(&full[s])), "r"(4096) : "memory");
          asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(at(data[s])),
                       "l"(from), "r"(4096), "r"(at(&full[s]))
                       : "memory");
        }
      } else {
        wait(&empty[s], (t / 2 & 1) ^ 1);
        for (int i = threadIdx.x; i < 1024; i += 128)
          data[s][i] = from[i];
        arrive(&full[s]);
      }
    }
  } else {
    if constexpr (Registers)
      asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    float sum = 0;
    for (int t = 0; t < tiles; ++t) {
      const int s = t % 2;
      wait(&full[s], t / 2 & 1);
      for (int i = threadIdx.x - 128; i < 1024; i += 256)
        sum += data[s][i];
      arrive(&empty[s]);
    }
    atomicAdd(out, sum);
  }
}
int main(int argc, char** argv) {
  const int which = atoi(argv[1]), tiles = atoi(argv[2]), launches = atoi(argv[3]);
  float *in, *out;
  cudaMalloc(&in, 64 * 4096);
  cudaMalloc(&out, 4);
  float host[1024];
  for (float& x : host)
    x = 1;
  for (int i = 0; i < 64; ++i)
    cudaMemcpy(in + i * 1024, host, 4096, cudaMemcpyHostToDevice);
  for (int i = 0; i < launches; ++i) {
    cudaMemset(out, 0, 4);
    if (which == 0)
      ring<0, 0><<<132, 384>>>(in, out, tiles);
    if (which == 1)
      ring<1, 0><<<132, 384>>>(in, out, tiles);
    if (which == 2)
      ring<0, 1><<<132, 384>>>(in, out, tiles);
    if (which == 3)
      ring<1, 1><<<132, 384>>>(in, out, tiles);
    float got = 0;
    cudaMemcpy(&got, out, 4, cudaMemcpyDeviceToHost);
    printf("variant %d launch %d: %.0f of %.0f, %s\n", which, i, got, 132.0 * 1024 * tiles, cudaGetErrorString(cudaGetLastError()));
    fflush(stdout);
  }
}
