// Truncation of distributions: top-k, then top-p, then min-p, with parameters per row.
//
// Legend: B rows, M positions, V vocabulary.

#pragma once

#include "tensor.h"

namespace outrider {

// The distributions p (B, M, V), restricted to the tokens that the parameters of each row, all (B,),
// keep, and renormalised: as sampling/truncate.py computes them. A row without parameters is copied.
Tensor truncated(const Tensor& p, const Tensor& top_k, const Tensor& top_p,
                 const Tensor& strict, const Tensor& min_p);

}  // namespace outrider
