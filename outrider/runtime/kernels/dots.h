// A linear layer over packed bfloat16 weights and bfloat16 inputs, by the instruction that multiplies
// pairs of them (AVX512_BF16), twice as many at once as in float32.
//
// The instruction adds the product of the upper halves, rounds, adds that of the lower halves, and
// rounds again. Products of bfloat16 numbers are exact in float32. So with the first input of each
// pair in the upper half, sums have the bits of the float32 kernel (packed.h), but for numbers below
// 1e-38, which count as zero: the number of tokens makes no difference, and the kernel serves exact
// models, too.

#pragma once

#include <algorithm>

#include "packed.h"

namespace outrider {

#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512BF16__)
constexpr bool kHasDots = true;
#else
constexpr bool kHasDots = false;
#endif

constexpr int64_t kDotTile = 12;  // tokens whose sums for a panel fit into the registers

// Rows of inputs as words of pairs, the first input of a pair in the upper half.
struct PairedInputs {
  const int32_t* data;
  int64_t words;  // of a row

  const int32_t* row(int64_t m) const { return data + m * words; }
};

constexpr int64_t words_of(int64_t K) { return (K + 1) / 2; }

// Writes K inputs as words.
inline void pair_up(const BFloat16* x, int64_t K, int32_t* to) {
  for (int64_t i = 0; i < K / 2; i++) {
    uint32_t both;
    std::memcpy(&both, x + 2 * i, sizeof both);
    to[i] = static_cast<int32_t>(both << 16 | both >> 16);
  }
  if (K % 2) to[K / 2] = static_cast<int32_t>(static_cast<uint32_t>(x[K - 1].x) << 16);
}

// The same for floats, rounded to bfloat16; K is even.
inline void pair_up(const float* x, int64_t K, int32_t* to) {
  int64_t i = 0;
#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512BF16__)
  for (; i + kLanes <= K / 2; i += kLanes) {
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + 2 * i + kLanes),
                                                      _mm512_loadu_ps(x + 2 * i));
    _mm512_storeu_si512(to + i, _mm512_rol_epi32(both, 16));
  }
#endif
  for (; i < K / 2; i++)
    to[i] = static_cast<int32_t>(static_cast<uint32_t>(BFloat16(x[2 * i]).x) << 16 |
                                 BFloat16(x[2 * i + 1]).x);
}

using NarrowTarget = TargetOf<BFloat16>;

inline void store_half(const V& total, const NarrowTarget& to, int m, int64_t first) {
  const int64_t count = std::min(kLanes, to.outputs - first);
  if (count <= 0) return;
  const float* bias = to.bias ? to.bias + first : nullptr;
  BFloat16* y = to.y + m * to.stride + first;
#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512BF16__)
  const __mmask16 mask = (1u << count) - 1;
  __m512 sums = total;
  if (bias) sums = _mm512_add_ps(sums, _mm512_maskz_loadu_ps(mask, bias));
  _mm256_mask_storeu_epi16(y, mask, (__m256i)_mm512_cvtneps_pbh(sums));
#else
  float sums[kLanes];
  total.store(sums);
  for (int64_t n = 0; n < count; n++) y[n] = BFloat16(sums[n] + (bias ? bias[n] : 0.f));
#endif
}

#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512BF16__)

inline __m512bh words(const int32_t* from) { return (__m512bh)_mm512_set1_epi32(*from); }

inline __m512bh load_words(const BFloat16* from) { return (__m512bh)_mm512_loadu_si512(from); }

// y = x wᵀ + bias for M tokens and P panels; To is a Target or a NarrowTarget.
template <int M, int P, typename To>
inline void dot_tile(const int32_t* x, int64_t stride, const Panels<BFloat16>& panels,
                     const To& to) {
  const int64_t rows = rows_of<BFloat16>(panels.K);
  __m512 sums[P][M][2];
  for (int p = 0; p < P; p++)
    for (int m = 0; m < M; m++) sums[p][m][0] = sums[p][m][1] = _mm512_setzero_ps();
  for (int64_t k = 0; k < rows; k += 2) {
    for (int p = 0; p < P; p++) {
      const BFloat16* from = panels.weights + (p * rows + k) * kPanel;
      __builtin_prefetch(reinterpret_cast<const char*>(from) + kAhead / P);
      __builtin_prefetch(reinterpret_cast<const char*>(from + kPanel) + kAhead / P);
      const __m512bh low = load_words(from), high = load_words(from + kPanel);
#pragma GCC unroll 12
      for (int m = 0; m < M; m++) {
        const __m512bh input = words(x + m * stride + k / 2);
        sums[p][m][0] = _mm512_dpbf16_ps(sums[p][m][0], input, low);
        sums[p][m][1] = _mm512_dpbf16_ps(sums[p][m][1], input, high);
      }
    }
  }
  for (int p = 0; p < P; p++)
    for (int m = 0; m < M; m++)
      for (int half = 0; half < 2; half++)
        store_half(V(sums[p][m][half]), to, m, p * kPanel + half * kLanes);
}

template <int M, typename To>
void dot_tokens(const int32_t* x, int64_t stride, const Panels<BFloat16>& panels, const To& to,
                int64_t count) {
  constexpr int P = panels_at_once<BFloat16>(M);
  int64_t p = 0;
  for (; p + P <= count; p += P) dot_tile<M, P>(x, stride, panels + p, to.at(0, p * kPanel));
  if constexpr (P > 1)
    for (; p < count; p++) dot_tile<M, 1>(x, stride, panels + p, to.at(0, p * kPanel));
}

// Any number of tokens, in tiles of nearly equal size; a panel stays in the processor's cache.
template <typename To>
void multiply_dots(int64_t M, const PairedInputs& x, const Panels<BFloat16>& panels, const To& to,
                   int64_t count) {
  const int64_t tiles = (M + kDotTile - 1) / kDotTile, at_once = tiles > 1 ? 1 : count;
  for (int64_t p = 0; p < count; p += at_once)
    for (int64_t i = 0; i < tiles; i++) {
      const int64_t first = M * i / tiles, last = M * (i + 1) / tiles;
      with_tokens<kDotTile>(last - first, [&](auto tokens) {
        dot_tokens<tokens>(x.row(first), x.words, panels + p, to.at(first, p * kPanel), at_once);
      });
    }
}

#else

template <typename To>
void multiply_dots(int64_t, const PairedInputs&, const Panels<BFloat16>&, const To&, int64_t) {}

#endif

}  // namespace outrider
