// A linear layer over weights in torch's own layout, a row per output.
//
// A sum runs over the lanes of a vector first and then across them, in the same order whatever the
// number of tokens. Weights are read once for up to kTile tokens.

#pragma once

#include <algorithm>

#include "vectors.h"

namespace outrider {

// y[m, r] = x[m, :] · w[r, :] + bias[r], for M tokens and R outputs; rows of y are N apart.
template <int M, int R, typename W>
inline void rows(const float* x, const W* w, const float* bias, float* y, int64_t K, int64_t N) {
  V sums[M][R];
  for (int m = 0; m < M; m++)
    for (int r = 0; r < R; r++) sums[m][r] = V(0.f);
  int64_t k = 0;
  for (; k + kLanes <= K; k += kLanes) {
    V weights[R];
    for (int r = 0; r < R; r++) weights[r] = load(w + r * K + k);
    for (int m = 0; m < M; m++) {
      const V inputs = load(x + m * K + k);
      for (int r = 0; r < R; r++) sums[m][r] = at::vec::fmadd(inputs, weights[r], sums[m][r]);
    }
  }
  for (int m = 0; m < M; m++)
    for (int r = 0; r < R; r++) {
      float total = sum(sums[m][r]);
      for (int64_t i = k; i < K; i++) total += x[m * K + i] * static_cast<float>(w[r * K + i]);
      y[m * N + r] = bias ? total + bias[r] : total;
    }
}

template <int M, int R, typename W>
void outputs(const float* x, const W* w, const float* bias, float* y, int64_t K, int64_t N,
             int64_t first, int64_t last) {
  auto at_bias = [&](int64_t n) { return bias ? bias + n : nullptr; };
  int64_t n = first;
  for (; n + R <= last; n += R) rows<M, R>(x, w + n * K, at_bias(n), y + n, K, N);
  for (; n < last; n++) rows<M, 1>(x, w + n * K, at_bias(n), y + n, K, N);
}

// Outputs `first` to `last` of a layer, for any number of tokens.
template <typename W>
void multiply_rows(const float* x, const W* w, const float* bias, float* y, int64_t M, int64_t K,
                   int64_t N, int64_t first, int64_t last) {
  for (int64_t m = 0; m < M; m += kTile) {
    const float* from = x + m * K;
    float* to = y + m * N;
    switch (std::min(kTile, M - m)) {
      case 1: outputs<1, 4>(from, w, bias, to, K, N, first, last); break;
      case 2: outputs<2, 4>(from, w, bias, to, K, N, first, last); break;
      case 3: outputs<3, 4>(from, w, bias, to, K, N, first, last); break;
      case 4: outputs<4, 2>(from, w, bias, to, K, N, first, last); break;
      case 5: outputs<5, 2>(from, w, bias, to, K, N, first, last); break;
      default: outputs<6, 2>(from, w, bias, to, K, N, first, last);
    }
  }
}

}  // namespace outrider
