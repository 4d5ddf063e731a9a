// Truncation of distributions: top-k, then top-p, then min-p, with parameters per row.
//
// Legend: B rows, M positions, V vocabulary.

#pragma once

#include <ATen/core/Tensor.h>

namespace outrider {

// The distributions p (B, M, V), restricted to the tokens that the parameters of each row, all (B,),
// keep, and renormalised: as sampling/truncate.py computes them. A row without parameters is copied.
at::Tensor truncated(const at::Tensor& p, const at::Tensor& top_k, const at::Tensor& top_p,
                     const at::Tensor& strict, const at::Tensor& min_p);

}  // namespace outrider
