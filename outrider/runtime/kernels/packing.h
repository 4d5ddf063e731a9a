// Packs the weights of linear layers in panels of outputs, as the kernels read them.
//
// Legend: K inputs, N outputs.

#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace outrider {

constexpr int kStep = 8;  // inputs of a group whose integers are unpacked at once (grouped.h)
constexpr int64_t kChunk = 32;  // inputs, of which groups have a multiple (integer_dots.h)

// kPanel (vectors.h), for code that does without vectors.
int64_t panel_outputs();

// Weights (N, K) as packed.h reads them, (⌈N / kPanel⌉, K, kPanel): in bfloat16, with an even number
// of inputs, where that loses nothing, unless the dtype is to be kept.
at::Tensor pack(const at::Tensor& weight, bool keep_dtype);

// 8-bit integers (N, K) and their scales (N,) as (⌈N / kPanel⌉, K + 4, kPanel).
at::Tensor pack_int8(const at::Tensor& weight, const at::Tensor& scale);

// Integers (N, K) of 8 or 4 bits, with scales and maybe offsets (N, groups) of float16, as grouped.h
// reads them.
at::Tensor pack_groups(const at::Tensor& values, const at::Tensor& scale,
                       const std::optional<at::Tensor>& offset, int64_t bits);

// The same as integer_dots.h reads them.
at::Tensor pack_integer_dots(const at::Tensor& values, const at::Tensor& scale,
                             const std::optional<at::Tensor>& offset, int64_t bits);

}  // namespace outrider
