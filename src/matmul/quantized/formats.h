// The forms of quantized weights that there are kernels for.
#pragma once

// EACH(format, ...) of each.
#define MLX_CUDA_EACH_FORMAT(EACH, ...) \
  EACH(affine2, __VA_ARGS__)            \
  EACH(affine3, __VA_ARGS__)            \
  EACH(affine4, __VA_ARGS__)            \
  EACH(affine5, __VA_ARGS__)            \
  EACH(affine6, __VA_ARGS__) EACH(affine8, __VA_ARGS__) EACH(mxfp4, __VA_ARGS__) EACH(mxfp8, __VA_ARGS__) EACH(nvfp4, __VA_ARGS__)

// A row of the host's table (runtime/kernel_table.h) of EACH(name, dtype, format, ...).
#define MLX_CUDA_FORMAT_ROW(name, dtype, format, ...) {#name, {#dtype, #format __VA_OPT__(, ) __VA_ARGS__}},
