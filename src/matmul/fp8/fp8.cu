// Quantization to FP8 (e4m3) with float32 scales, each the largest finite magnitude of its part over 448: of a tensor, of each
// row, of each 1 x 128 of a row, or of each 128 x 128 of a matrix.
//
// Rows have any stride. A thread reads N elements at a time: 16 bytes, or one element if rows are not aligned to 16 bytes or N
// does not divide them. Division is IEEE's: the values are those of converting x / scale.
#include "device/ptx.cuh"
#include "device/reduce.cuh"
#include "device/types.cuh"
#include "device/vector.cuh"
#include "matmul/fp8/params.h"

namespace mlx_cuda {

constexpr int kThreads = Fp8Shape::kThreads;
constexpr int kBlock = Fp8Shape::kBlock;
constexpr float kLargestFp8 = 448.0f;
constexpr float kSmallestScale = 0x1p-126f;  // its reciprocal is finite too

template <typename T>
struct Matrix : Fp8Matrix<T> {
  // Zeros behind the end of a row.
  template <int N>
  __device__ Vector<T, N> load(long long row, long long column) const {
    return column < this->columns ? *reinterpret_cast<const Vector<T, N>*>(this->data + row * this->stride + column)
                                  : Vector<T, N>{};
  }
};

// The largest finite magnitude. Magnitudes of 16 bits are compared as integers, two at a time; infinity and NaN are the largest of
// these.
template <typename T, int N>
__device__ inline float largest(const Vector<T, N>& in, float so_far) {
  if constexpr (sizeof(T) == 2 && N > 1) {
    const auto* words = reinterpret_cast<const unsigned*>(in.value);
    const T infinity = from_float<T>(__int_as_float(0x7f800000));
    const unsigned limit = *reinterpret_cast<const unsigned short*>(&infinity);
    unsigned most = 0;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      most = __vmaxu2(most, words[i] & 0x7fff7fff);
    }
    most = max(most >> 16, most & 0xffff);
    if (most >= limit) {
      most = 0;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const unsigned magnitude = words[i / 2] >> 16 * (i % 2) & 0x7fff;
        most = magnitude < limit ? max(most, magnitude) : most;
      }
    }
    const auto bits = static_cast<unsigned short>(most);
    return fmaxf(so_far, to_float(*reinterpret_cast<const T*>(&bits)));
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float magnitude = fabsf(to_float(in.value[i]));
      so_far = magnitude < __int_as_float(0x7f800000) ? fmaxf(so_far, magnitude) : so_far;
    }
    return so_far;
  }
}

template <typename T, int N, int Count>
__device__ inline float largest(const Vector<T, N> (&all)[Count]) {
  float most = 0.0f;
#pragma unroll
  for (int i = 0; i < Count; ++i) {
    most = largest(all[i], most);
  }
  return most;
}

template <int Lanes>
__device__ inline float largest_of_lanes(float x) {
  return of_lanes<Lanes>(x, [](float one, float other) { return fmaxf(one, other); });
}

__device__ inline float largest_of_block(float x) {
  __shared__ float warps[32];
  x = largest_of_lanes<32>(x);
  if (threadIdx.x % 32 == 0) {
    warps[threadIdx.x / 32] = x;
  }
  __syncthreads();
  return largest_of_lanes<32>(threadIdx.x % 32 < blockDim.x / 32 ? warps[threadIdx.x % 32] : 0.0f);
}

// x / y from about 1 / y, rounded as IEEE division: x times that, corrected by the remainder.
__device__ inline float divide(float x, float y, float reciprocal) {
  const float quotient = x * reciprocal;
  return fmaf(fmaf(-quotient, y, x), reciprocal, quotient);
}

struct Scale {
  float value, reciprocal;

  __device__ explicit Scale(float largest) : value(fmaxf(divide(largest, kLargestFp8, 1.0f / kLargestFp8), kSmallestScale)) {
    reciprocal = __frcp_rn(value);
  }

  __device__ float under(float x) const {
    const float quotient = x * reciprocal;
    const bool ordinary = fabsf(quotient) <= 2 * kLargestFp8 && quotient != 0.0f;
    return ordinary ? divide(x, value, reciprocal) : quotient;  // infinity would leave NaN, and -0 leave 0
  }
};

// Pairs of numbers from the word that they came in, without 16-bit registers in between.
__device__ inline float2 halves(unsigned word, __half) {
  return __half22float2(*reinterpret_cast<const __half2*>(&word));
}
__device__ inline float2 halves(unsigned word, __nv_bfloat16) {
  return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000)};
}

template <typename T, int N>
__device__ inline float2 pair(const Vector<T, N>& x, int i) {
  if constexpr (sizeof(T) == 2 && N > 1) {
    return halves(reinterpret_cast<const unsigned*>(x.value)[i / 2], T{});
  } else {
    return {to_float(x.value[i]), N > 1 ? to_float(x.value[(i + 1) % N]) : 0.0f};
  }
}

template <typename T, int N>
__device__ inline void store(unsigned char* to, const Vector<T, N>& x, const Scale& scale) {
  Vector<unsigned char, N> out;
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    const float2 wide = pair(x, i);
    const unsigned both = to_fp8(scale.under(wide.x), scale.under(wide.y));
    out.value[i] = static_cast<unsigned char>(both);
    out.value[(i + 1) % N] = static_cast<unsigned char>(N == 1 ? both : both >> 8);
  }
  *reinterpret_cast<Vector<unsigned char, N>*>(to) = out;
}

// A row by all threads of a block, which is as wide as the row needs, or by one warp. Values that a thread has read first stay in
// registers; the rest of long rows is read again, from the cache.
template <typename T, int N, bool Short>
__device__ inline void quantize_rows(const Matrix<T>& in, unsigned char* values, float* scales) {
  constexpr int kKept = Fp8Shape::kKept;
  const int lanes = Short ? 32 : static_cast<int>(blockDim.x);
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  const long long row = Short ? static_cast<long long>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32 : blockIdx.x;
  if (row >= in.rows) {
    return;
  }
  const int step = lanes * N;
  const long long first = lane * N;
  unsigned char* to = values + row * in.columns;
  Vector<T, N> kept[kKept];
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    kept[i] = in.template load<N>(row, first + i * step);
  }
  float most = largest(kept);
#pragma unroll 4
  for (long long column = first + kKept * step; column < in.columns; column += step) {
    most = largest(in.template load<N>(row, column), most);
  }
  const Scale scale(Short ? largest_of_lanes<32>(most) : largest_of_block(most));
  if (lane == 0) {
    scales[row] = scale.value;
  }
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    if (first + i * step < in.columns) {
      store(to + first + i * step, kept[i], scale);
    }
  }
#pragma unroll 2
  for (long long column = first + kKept * step; column < in.columns; column += step) {
    store(to + column, in.template load<N>(row, column), scale);
  }
}

// A block of 128 of some rows by adjacent lanes, `across` blocks side by side in a thread block. The scales of all rows for one
// block are adjacent, as cuBLASLt reads them.
template <typename T, int N>
__device__ inline void quantize_blocks(const Matrix<T>& in, unsigned char* values, float* scales, int across) {
  constexpr int kLanes = N == 1 ? 32 : kBlock / N;
  constexpr int kEach = kBlock / (N * kLanes);
  constexpr int kRows = N == 1 ? 1 : Fp8Shape::kBlockRows;
  const int group = static_cast<int>(threadIdx.x) / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const long long block = static_cast<long long>(blockIdx.y) * across + group % across;
  const long long row = (static_cast<long long>(blockIdx.x) * (kThreads / kLanes / across) + group / across) * kRows;
  const long long first = block * kBlock + lane * N;
  Vector<T, N> kept[kRows][kEach];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      kept[r][i] = row + r < in.rows ? in.template load<N>(row + r, first + i * kLanes * N) : Vector<T, N>{};
    }
  }
  float mine = 0.0f;  // the scale that this lane writes
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const Scale scale(largest_of_lanes<kLanes>(largest(kept[r])));
    mine = lane == r ? scale.value : mine;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const long long column = first + i * kLanes * N;
      if (row + r < in.rows && column < in.columns) {
        store(values + (row + r) * in.columns + column, kept[r][i], scale);
      }
    }
  }
  if (lane < kRows && row + lane < in.rows && block * kBlock < in.columns) {
    scales[block * in.rows + row + lane] = mine;
  }
}

// Vectors stay in registers; of single elements there would be too many, so these are read again, from the cache.
template <typename T, int N>
__device__ inline void quantize_tiles(const Matrix<T>& in, unsigned char* values, float* scales) {
  constexpr int kLanes = kBlock / N;
  constexpr int kStep = kThreads / kLanes;
  constexpr int kKept = N == 1 ? 1 : kBlock / kStep;
  const long long column = static_cast<long long>(blockIdx.x) * kBlock + threadIdx.x % kLanes * N;
  const long long first = static_cast<long long>(blockIdx.y) * kBlock + threadIdx.x / kLanes;
  auto load = [&](int i) {
    const long long row = first + i * kStep;
    return row < in.rows ? in.template load<N>(row, column) : Vector<T, N>{};
  };
  Vector<T, N> kept[kKept];
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    kept[i] = load(i);
  }
  float most = largest(kept);
#pragma unroll 4
  for (int i = kKept; i < kBlock / kStep; ++i) {
    most = largest(load(i), most);
  }
  const Scale scale(largest_of_block(most));
  if (threadIdx.x == 0) {
    scales[static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x] = scale.value;
  }
  auto write = [&](int i, const Vector<T, N>& x) {
    const long long row = first + i * kStep;
    if (row < in.rows && column < in.columns) {
      store(values + row * in.columns + column, x, scale);
    }
  };
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    write(i, kept[i]);
  }
#pragma unroll 1
  for (int i = kKept; i < kBlock / kStep; ++i) {
    write(i, load(i));
  }
}

// Calls `use` with each vector of this thread, after reading several of a row.
template <typename T, int N, typename Use>
__device__ inline void for_all(const Matrix<T>& in, bool backwards, const Use& use) {
  constexpr int kTogether = Fp8Shape::kTogether;
  constexpr int kStep = kThreads * N;
  const long long parts = (in.columns + kTogether * kStep - 1) / (kTogether * kStep);
  for (long long row = blockIdx.y; row < in.rows; row += gridDim.y) {
    for (long long part = blockIdx.x; part < parts; part += gridDim.x) {
      const long long y = backwards ? in.rows - 1 - row : row;
      const long long first = (backwards ? parts - 1 - part : part) * kTogether * kStep + threadIdx.x * N;
      Vector<T, N> x[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        x[i] = in.template load<N>(y, first + i * kStep);
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (first + i * kStep < in.columns) {
          use(y, first + i * kStep, x[i]);
        }
      }
    }
  }
}

// The largest of each thread block's share, of which quantize_tensor, launched next, takes the largest. That one starts at the end,
// which is still in the cache.
template <typename T, int N>
__device__ inline void largest_of_tensor(const Matrix<T>& in, float* partial) {
  float most = 0.0f;
  for_all<T, N>(in, false, [&](long long, long long, const Vector<T, N>& x) { most = largest(x, most); });
  most = largest_of_block(most);
  if (threadIdx.x == 0) {
    partial[blockIdx.y * gridDim.x + blockIdx.x] = most;
  }
}

template <typename T, int N>
__device__ inline void quantize_tensor(
    const Matrix<T>& in, unsigned char* values, float* scale_out, const float* partial, int partials) {
  float most = 0.0f;
  for (int i = static_cast<int>(threadIdx.x); i < partials; i += kThreads) {
    most = fmaxf(most, partial[i]);
  }
  const Scale scale(largest_of_block(most));
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
    *scale_out = scale.value;
  }
  for_all<T, N>(in, true, [&](long long row, long long column, const Vector<T, N>& x) {
    store(values + row * in.columns + column, x, scale);
  });
}

#define MLX_CUDA_FP8_KERNEL extern "C" __global__ void __launch_bounds__(kThreads)

#define MLX_CUDA_FP8_VALUES(name, T, ...)                                        \
  MLX_CUDA_FP8_KERNEL name(Matrix<T> in, unsigned char* values, float* scales) { \
    __VA_ARGS__(in, values, scales);                                             \
  }
#define MLX_CUDA_fp8_rows(name, T, N) MLX_CUDA_FP8_VALUES(name, T, quantize_rows<T, N, false>)
#define MLX_CUDA_fp8_short_rows(name, T, N) MLX_CUDA_FP8_VALUES(name, T, quantize_rows<T, N, true>)
#define MLX_CUDA_fp8_tiles(name, T, N) MLX_CUDA_FP8_VALUES(name, T, quantize_tiles<T, N>)
#define MLX_CUDA_fp8_blocks(name, T, N)                                                      \
  MLX_CUDA_FP8_KERNEL name(Matrix<T> in, unsigned char* values, float* scales, int across) { \
    quantize_blocks<T, N>(in, values, scales, across);                                       \
  }
#define MLX_CUDA_fp8_largest(name, T, N)                   \
  MLX_CUDA_FP8_KERNEL name(Matrix<T> in, float* partial) { \
    largest_of_tensor<T, N>(in, partial);                  \
  }
#define MLX_CUDA_fp8_tensor(name, T, N)                                                                             \
  MLX_CUDA_FP8_KERNEL name(Matrix<T> in, unsigned char* values, float* scale, const float* partial, int partials) { \
    quantize_tensor<T, N>(in, values, scale, partial, partials);                                                    \
  }
#define MLX_CUDA_FP8(name, dtype, VECTOR, kernel) MLX_CUDA_##kernel(name, types::dtype, (VECTOR ? 16 / sizeof(types::dtype) : 1))
MLX_CUDA_FP8_KERNELS(MLX_CUDA_FP8)

}  // namespace mlx_cuda
