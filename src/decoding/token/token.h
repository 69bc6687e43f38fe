// A token's attention with all that comes between it and the projections.
#pragma once

#include "attention/call.h"
#include "decoding/heads/heads.h"
#include "decoding/token/params.h"

namespace mlx_cuda {

struct TokenCall {
  HeadsCall heads;
  AttentionArrays in;
  AttentionOptions options;
  bool settled;  // TokenParams
  mx::array out;

  Arrays inputs() const;
  Arrays outputs() const;
  std::string name() const;
};

// Such heads and the attention that reads them; none where this GPU, these heads or so many sequences have no kernel for both, or
// where others read the queries as well.
std::optional<TokenCall> token_call(const Plan& plan, const HeadsCall& heads);

// Both in one kernel.
Item token_item(const TokenCall& call);

// Copies what a kernel cannot read, except the rows of the projections.
void make_readable(TokenCall& call, const mx::Stream& stream);
// The parameters of such a call, without the rows and the result.
TokenParams token_params(TokenCall& call, KernelNode& node);

}  // namespace mlx_cuda
