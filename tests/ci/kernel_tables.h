// The tables of kernels, for the preprocessor: of each source the names of its kernels, those after "!" on no Hopper.
#include "all_sum/params.h"
#include "attention/decode/kernels.h"
#include "attention/flash/kernels.h"
#include "attention/flash/mask_tiles_params.h"
#include "decoding/append/params.h"
#include "decoding/heads/params.h"
#include "decoding/persistent/params.h"
#include "decoding/router/params.h"
#include "decoding/row_norm/params.h"
#include "decoding/token/params.h"
#include "device/layout.h"
#include "elementwise/kernels.h"
#include "matmul/dense/kernels.h"
#include "matmul/fp8/params.h"
#include "matmul/gemv/kernels.h"
#include "matmul/grouped/kernels.h"
#include "matmul/quantized/kernels.h"
#include "recurrence/kernels.h"

// clang-format off: this is no C++
#define NAME(name, ...) + name
#define NOT_SM90(name, ...) ! name

TABLE "all_sum" MLX_CUDA_ALL_SUM_KERNELS(NAME);
TABLE "chunk_gradients" MLX_CUDA_CHUNK_GRADIENT_KERNELS(NAME, NAME);
TABLE "chunked" MLX_CUDA_CHUNKED_KERNELS(NAME, NAME);
TABLE "chunked_back" MLX_CUDA_CHUNKED_BACK_KERNELS(NAME);
TABLE "copy" MLX_CUDA_COPY_KERNELS(NAME);
TABLE "decode" MLX_CUDA_DECODE_KERNELS(NAME, NAME);
TABLE "decode_direct" MLX_CUDA_DIRECT_KERNELS(NAME);
TABLE "decode_quantized" MLX_CUDA_DECODE_QUANTIZED_KERNELS(NAME);
TABLE "decode_sm90" MLX_CUDA_DECODE_SM90_KERNELS(NAME);
TABLE "decode_wide" MLX_CUDA_WIDE_KERNELS(NAME);
TABLE "dequantize" MLX_CUDA_DEQUANTIZE_KERNELS(NAME);
TABLE "epilogue" MLX_CUDA_EPILOGUE_KERNELS(NAME, NAME);
TABLE "flash" MLX_CUDA_FLASH_KERNELS(NAME, NOT_SM90);
TABLE "flash_sm90" MLX_CUDA_FLASH_SM90_KERNELS(NAME);
TABLE "fp8" MLX_CUDA_FP8_KERNELS(NAME);
TABLE "gather" MLX_CUDA_GATHER_MV_KERNELS(NAME);
TABLE "gemv" MLX_CUDA_GEMV_KERNELS(NAME, NAME);
TABLE "gemv_many_sm90" MLX_CUDA_GEMV_MANY_KERNELS(NAME);
TABLE "gemv_moe" MLX_CUDA_GEMV_KERNELS(NAME, NAME);
TABLE "gemv_unpacked" MLX_CUDA_GEMV_UNPACKED_KERNELS(NAME);
TABLE "gradient" MLX_CUDA_GRADIENT_KERNELS(NAME, NAME);
TABLE "grouped" MLX_CUDA_GROUPED_KERNELS(NAME, NAME);
TABLE "grouped_gradient_sm90" MLX_CUDA_GROUPED_GRADIENT_KERNELS(NAME);
TABLE "grouped_quantized_sm90" MLX_CUDA_GROUPED_QUANTIZED_KERNELS(NAME);
TABLE "grouped_sm90" MLX_CUDA_GROUPED_SM90_KERNELS(NAME);
TABLE "heads" MLX_CUDA_HEADS_KERNELS(NAME, NAME);
TABLE "mask_tiles" MLX_CUDA_MASK_STATES_KERNELS(NAME);
TABLE "persistent_sm90" MLX_CUDA_PERSISTENT_KERNELS(NAME);
TABLE "quantized_moe_sm90" MLX_CUDA_MOE_KERNELS(NAME);
TABLE "quantized_plain" MLX_CUDA_PLAIN_KERNELS(NAME, NAME) MLX_CUDA_QUANTIZED_MERGE_KERNELS(NAME);
TABLE "quantized_small_m" MLX_CUDA_SMALL_M_KERNELS(NAME, NOT_SM90);
TABLE "quantized_sm90" MLX_CUDA_QUANTIZED_SM90_KERNELS(NAME, NAME);
TABLE "recurrent" MLX_CUDA_RECURRENT_KERNELS(NAME);
TABLE "recurrent_few" MLX_CUDA_RECURRENT_FEW_KERNELS(NAME);
TABLE "router" MLX_CUDA_ROUTER_KERNELS(NAME);
TABLE "row_norm" MLX_CUDA_ROW_NORM_KERNELS(NAME);
TABLE "short_conv" MLX_CUDA_SHORT_CONV_KERNELS(NAME, NAME);
TABLE "step" MLX_CUDA_STEP_APPEND_KERNELS(NAME);
TABLE "swiglu" MLX_CUDA_SWIGLU_KERNELS(NAME);
TABLE "token_sm90" MLX_CUDA_TOKEN_KERNELS(NAME);
