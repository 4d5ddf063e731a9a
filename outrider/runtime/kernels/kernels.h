// Linear layers and attention for forward passes over few tokens, on a CPU.
//
// Legend: M tokens, K inputs, N outputs; B rows, H query heads, G key heads, S slots, C width.

#pragma once

#include "tensor.h"

namespace outrider {

constexpr int64_t kAnyNumber = int64_t{1} << 62;  // the `widest` of exact layers (layers.py)

// x wᵀ + bias, if there is one, (…, K) to (…, outputs), for weights (N, K) or packed (three dimensions, packed.h, or
// four, grouped.h); for more than `widest` tokens, weights that are not packed are multiplied by
// torch.
Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias, int64_t outputs,
              int64_t widest);

// Layers with the same input, their outputs side by side; all of them have biases, or none.
Tensor linears(const Tensor& x, Tensors weights, Tensors biases, Sizes outputs, int64_t widest);

// The same by torch, for weights (N, K).
Tensor linears_by_torch(const Tensor& x, Tensors weights, Tensors biases);

// softmax(scale q kᵀ + mask) v for q (B, H, N, C), k (B, G, S, C), v (B, G, S, D) and mask
// (B or 1, 1, N, S), as (B, N, H, D); for more than `widest` query tokens in sums whose order depends
// on their number (attend_wide.h).
Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask, double scale,
              int64_t widest);

}  // namespace outrider
