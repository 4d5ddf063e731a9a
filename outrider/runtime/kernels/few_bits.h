// Linear layers over weights of 8 or 4 bits, with a scale per output or per group of inputs. They are a
// library of their own, which is compiled when a model with such weights is first loaded: it takes a
// compiler about as long as all other kernels that compute by vectors.
//
// Legend: M tokens, K inputs, N outputs of all layers.

#pragma once

#include "dots.h"
#include "joined_layers.h"

namespace outrider {

// The functions of the library.
struct FewBits {
  // Outputs of the panels `first` to `last` of a layer, in float32; y's rows are N apart (packed.h,
  // grouped.h).
  void (*multiply)(const Layer& layer, const float* x, float* y, int64_t M, int64_t K, int64_t N,
                   int64_t first, int64_t last);
  // The same for bfloat16 inputs, which are given in pairs, too (grouped_dots.h).
  void (*multiply_pairs)(const Layer& layer, const BFloat16* x, const PairedInputs& pairs,
                         BFloat16* y, int64_t M, int64_t K, int64_t N, int64_t first, int64_t last);
  // Outputs of all layers, for inputs that are rounded to 8 bits (integer_dots.h).
  void (*multiply_rounded)(const float* x, float* y, const Layers& layers, int64_t M, int64_t K,
                           int64_t N, bool exact);
  void (*multiply_rounded_narrow)(const BFloat16* x, BFloat16* y, const Layers& layers, int64_t M,
                                  int64_t K, int64_t N, bool exact);
};

// The library, once it is loaded.
extern const FewBits* few_bits;

}  // namespace outrider
