// Which elementwise kernels there are: device code instantiates these tables, and the host chooses from them.
#pragma once

// swiglu.cu. EACH(name, dtype, whether a thread has 16 bytes at a time).
#define MLX_CUDA_SWIGLU_KERNELS(EACH)          \
  EACH(swiglu_float32_vector, float32, true)   \
  EACH(swiglu_float16_vector, float16, true)   \
  EACH(swiglu_bfloat16_vector, bfloat16, true) \
  EACH(swiglu_float32_scalar, float32, false)  \
  EACH(swiglu_float16_scalar, float16, false)  \
  EACH(swiglu_bfloat16_scalar, bfloat16, false)
