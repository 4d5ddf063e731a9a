// Functions of single numbers and of single rows, with the same instructions for every element.
//
// torch's own loops treat the last elements of a buffer, past the unrolled vector width, and the
// boundaries between threads by other instructions, so that a token's bits depend on how many
// tokens share its forward pass. Here a partial vector is padded with zeros and computed as a full
// one.
//
// All of them compute in float32 and return the dtype of their input.

#pragma once

#include "tensor.h"

namespace outrider {

// OUTRIDER_FUNCTIONS(act) writes act(name) for every function of single numbers.
#define OUTRIDER_FUNCTIONS(act) \
  act(exp) act(tanh) act(sin) act(cos) act(sigmoid) act(silu) act(gelu) act(gelu_tanh)

#define OUTRIDER_DECLARE(name) Tensor name(const Tensor& x);
OUTRIDER_FUNCTIONS(OUTRIDER_DECLARE)

// The mean over the last dimension, which `keepdim` leaves with size 1.
Tensor mean(const Tensor& x, bool keepdim);

// (x - mean) / sqrt(variance + eps) * weight + bias over the last dimension; weight and bias may be
// undefined.
Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps);

}  // namespace outrider
