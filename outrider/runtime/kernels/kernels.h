// Linear layers and attention for forward passes over few tokens, on a CPU.
//
// Legend: M tokens, K inputs, N outputs; B rows, H query heads, G key heads, S slots, C width.

#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace outrider {

constexpr int64_t kAnyNumber = int64_t{1} << 62;  // the `widest` of exact layers (layers.py)

// x wᵀ + bias, (…, K) to (…, outputs), for weights (N, K) or packed (three dimensions, packed.h, or
// four, grouped.h); for more than `widest` tokens, weights that are not packed are multiplied by
// torch.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight,
                  const std::optional<at::Tensor>& bias, int64_t outputs, int64_t widest);

// Layers with the same input, their outputs side by side; all of them have biases, or none.
at::Tensor linears(const at::Tensor& x, at::TensorList weights, at::TensorList biases,
                   at::IntArrayRef outputs, int64_t widest);

// The same by torch, for weights (N, K).
at::Tensor linears_by_torch(const at::Tensor& x, at::TensorList weights, at::TensorList biases);

// softmax(scale q kᵀ + mask) v for q (B, H, N, C), k (B, G, S, C), v (B, G, S, D) and mask
// (B or 1, 1, N, S), as (B, N, H, D); for more than `widest` query tokens in sums whose order depends
// on their number (attend_wide.h).
at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                  const at::Tensor& mask, double scale, int64_t widest);

}  // namespace outrider
