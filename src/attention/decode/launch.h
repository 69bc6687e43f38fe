// Arguments of a decode kernel.
#pragma once

#include "attention/call.h"
#include "attention/decode/params.h"
#include "attention/decode/plans.h"
#include "runtime/node.h"

#include <mlx/backend/cuda/device.h>

namespace mlx_cuda {

DecodeStrides strides_of(const mx::array& in);

// Everything that does not depend on addresses.
DecodeParams decode_params(const DecodeProblem& problem, const DecodePlan& plan, const AttentionOptions& options);

// Names inputs and outputs of the kernel, and says where they are.
void set_arrays(DecodeParams& params, const AttentionArrays& in, Arrays& outputs, KernelNode& node);

// Memory for the results of parts, where they have to be merged.
void allocate_partials(DecodeParams& params, const DecodePlan& plan, CommandEncoder& encoder, const mx::Stream& stream);

// Queries with readable rows, and vectors one element after another; the mask may be anything.
void make_readable(AttentionArrays& in, CommandEncoder& encoder, const mx::Stream& stream);

}  // namespace mlx_cuda
