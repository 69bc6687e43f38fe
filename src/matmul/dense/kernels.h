// Which kernels of dense layers there are: device code instantiates these tables, and the host chooses from them.
#pragma once

// epilogue.cu. EACH(name, dtype) and SCALING(name, dtype).
#define MLX_CUDA_EPILOGUE_KERNELS(EACH, SCALING) \
  EACH(epilogue_float32, float32)                \
  EACH(epilogue_float16, float16)                \
  EACH(epilogue_bfloat16, bfloat16)              \
  SCALING(scaling_float32, float32)              \
  SCALING(scaling_float16, float16)              \
  SCALING(scaling_bfloat16, bfloat16)

// gradient.cu. EACH(name, dtype, whether a thread has 16 bytes at a time) and SUMS(name, dtype).
#define MLX_CUDA_GRADIENT_KERNELS(EACH, SUMS)     \
  EACH(gradient_float32_vector, float32, true)    \
  EACH(gradient_float16_vector, float16, true)    \
  EACH(gradient_bfloat16_vector, bfloat16, true)  \
  EACH(gradient_float32_scalar, float32, false)   \
  EACH(gradient_float16_scalar, float16, false)   \
  EACH(gradient_bfloat16_scalar, bfloat16, false) \
  SUMS(column_sums_float32, float32)              \
  SUMS(column_sums_float16, float16)              \
  SUMS(column_sums_bfloat16, bfloat16)
