// Which kernels of linear attention there are: device code instantiates these tables, and the host chooses from them.
#pragma once

// chunked.cu. PREPARE and SCAN(name, dtype, delta rule).
#define MLX_CUDA_CHUNKED_KERNELS(PREPARE, SCAN)          \
  PREPARE(chunk_prepare_delta_float16, float16, true)    \
  SCAN(chunk_scan_delta_float16, float16, true)          \
  PREPARE(chunk_prepare_delta_bfloat16, bfloat16, true)  \
  SCAN(chunk_scan_delta_bfloat16, bfloat16, true)        \
  PREPARE(chunk_prepare_plain_float16, float16, false)   \
  SCAN(chunk_scan_plain_float16, float16, false)         \
  PREPARE(chunk_prepare_plain_bfloat16, bfloat16, false) \
  SCAN(chunk_scan_plain_bfloat16, bfloat16, false)
// chunked_back.cu, as these.
#define MLX_CUDA_CHUNKED_BACK_KERNELS(EACH)        \
  EACH(chunk_scans_delta_float16, float16, true)   \
  EACH(chunk_scans_delta_bfloat16, bfloat16, true) \
  EACH(chunk_scans_plain_float16, float16, false)  \
  EACH(chunk_scans_plain_bfloat16, bfloat16, false)
// chunk_gradients.cu, with SUMS(name, dtype).
#define MLX_CUDA_CHUNK_GRADIENT_KERNELS(EACH, SUMS)     \
  EACH(chunk_gradients_delta_float16, float16, true)    \
  EACH(chunk_gradients_delta_bfloat16, bfloat16, true)  \
  EACH(chunk_gradients_plain_float16, float16, false)   \
  EACH(chunk_gradients_plain_bfloat16, bfloat16, false) \
  SUMS(chunk_shared_sums_float16, float16)              \
  SUMS(chunk_shared_sums_bfloat16, bfloat16)

// EACH(name, elements of a key at most, whether each channel has a decay): recurrent.cu and recurrent_few.cu, of all dtypes.
#define MLX_CUDA_RECURRENT_KERNELS(EACH)  \
  EACH(recurrent_heads_128, 128, false)   \
  EACH(recurrent_channels_128, 128, true) \
  EACH(recurrent_heads_256, 256, false)   \
  EACH(recurrent_channels_256, 256, true)
#define MLX_CUDA_RECURRENT_FEW_KERNELS(EACH)  \
  EACH(recurrent_few_heads_128, 128, false)   \
  EACH(recurrent_few_channels_128, 128, true) \
  EACH(recurrent_few_heads_256, 256, false)   \
  EACH(recurrent_few_channels_256, 256, true)

// short_conv.cu: TOKEN(name, dtype), of one token and any taps, and TOKENS(name, dtype, taps).
#define MLX_CUDA_SHORT_CONV_KERNELS(TOKEN, TOKENS) \
  TOKEN(short_conv_float16, float16)               \
  TOKENS(short_conv_3_float16, float16, 3)         \
  TOKENS(short_conv_4_float16, float16, 4)         \
  TOKEN(short_conv_bfloat16, bfloat16)             \
  TOKENS(short_conv_3_bfloat16, bfloat16, 3)       \
  TOKENS(short_conv_4_bfloat16, bfloat16, 4)
