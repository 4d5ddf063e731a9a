// A linear layer over weights of 8 or 4 bits in groups for many tokens, by the processor's matrix
// unit: each panel's weights are folded with their scales into bfloat16 numbers, and then multiplied
// as those of tiles.h.
//
// A weight is rounded once to bfloat16, and so are inputs that were rounded to 8 bits. Scaling the
// sums of groups instead, as grouped_tiles.h does, rounds nothing, but takes longer than all products
// where there are many tokens. Exact models do without folding, and so do float32 inputs.

#pragma once

#include <vector>

#include "grouped.h"
#include "integer_dots.h"
#include "tiles.h"

namespace outrider {

#if defined(CPU_CAPABILITY_AVX512)

// Rounded to bfloat16, in the upper half of each word.
inline __m512i rounded_words(const V& numbers) {
  const __m512i bits = _mm512_castps_si512(numbers);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i raised = _mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7fff));
  return _mm512_and_si512(raised, _mm512_set1_epi32(0xffff0000));
}

// Stores two inputs' weights as Panels<BFloat16> has them.
inline void store_folded(const Pair& first, const Pair& second, BFloat16* to) {
  auto word = [](const V& one, const V& other) {
    return _mm512_or_si512(rounded_words(one), _mm512_srli_epi32(rounded_words(other), 16));
  };
  _mm512_storeu_si512(to, word(first.low, second.low));
  _mm512_storeu_si512(to + kPanel, word(first.high, second.high));
}

// The integers of a word per output (integer_dots.h).
template <int Bits, bool Offset>
struct Words {
  static constexpr int kBias = Bits == 8 ? 128 : Offset ? 0 : 8;
  __m512i low, high;

  explicit Words(const int8_t* from)
      : low(_mm512_loadu_si512(from)), high(_mm512_loadu_si512(from + kPanel * 2)) {}
  static V floats(__m512i words, int input) {
    const int shift = Bits == 8 ? 8 * input : 8 * (input % 4) + 4 * (input / 4);
    const __m512i u = _mm512_and_si512(_mm512_srli_epi32(words, shift),
                                       _mm512_set1_epi32((1 << Bits) - 1));
    return _mm512_cvtepi32_ps(_mm512_sub_epi32(u, _mm512_set1_epi32(kBias)));
  }
  Pair at(int input) const { return {floats(low, input), floats(high, input)}; }
};

// A panel whose integers are read `Count` inputs at a time by Integers, in a buffer of this thread
// that the next call overwrites.
template <int Count, typename Integers, bool Offset, typename Format>
Panels<BFloat16> folded_by(const Format& panel) {
  thread_local std::vector<BFloat16> weights;
  weights.resize(panel.K * kPanel);
  BFloat16* to = weights.data();
  const int8_t* from = panel.bytes;
  const int64_t bytes = (panel.group_bytes() - Format::kHead) * Count / panel.group;
  for (int64_t k = 0; k < panel.K;) {
    const Affine<Offset> affine(from);
    from += Format::kHead;
    for (const int64_t end = k + panel.group; k < end; k += Count, from += bytes) {
      const Integers integers(from);
#pragma GCC unroll 8
      for (int i = 0; i < Count; i += 2, to += 2 * kPanel)
        store_folded(affine.weights(integers.at(i)), affine.weights(integers.at(i + 1)), to);
    }
  }
  return {weights.data(), panel.K};
}

template <int Bits, bool Offset>
Panels<BFloat16> folded(const GroupedPanels<Bits, Offset>& panel) {
  return folded_by<kStep, Step<Bits, Offset>, Offset>(panel);
}

template <int Bits, bool Offset>
Panels<BFloat16> folded(const IntegerPanels<Bits, Offset>& panel) {
  return folded_by<32 / Bits, Words<Bits, Offset>, Offset>(panel);
}

// Inputs that were rounded to 8 bits, as bfloat16 numbers in pairs.
inline void pair_up_rounded(const RoundedInputs& x, int32_t* to) {
  thread_local std::vector<float> row;
  row.resize(x.K);
  const int64_t group = x.K / x.groups;
  for (int64_t k = 0; k < x.K; k += kLanes) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x.values + k));
    const V integers = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
    (integers * V(x.scales[k / group])).store(&row[k]);
  }
  pair_up(row.data(), x.K, to);
}

// y = x wᵀ + bias; panels are GroupedPanels or IntegerPanels.
template <typename Grouped, typename To>
void multiply_folded(int64_t M, const PairedInputs& x, const Grouped& panels, const To& to,
                     int64_t count) {
  for (int64_t p = 0; p < count; p++)
    multiply_tiles(M, x, folded(panels + p), to.at(0, p * kPanel), 1);
}

#else

inline void pair_up_rounded(const RoundedInputs&, int32_t*) {}

template <typename Grouped, typename To>
void multiply_folded(int64_t, const PairedInputs&, const Grouped&, const To&, int64_t) {}

#endif

// Whether M tokens of K inputs are multiplied by folded weights.
inline bool use_folded(int64_t M, int64_t K) { return M >= OUTRIDER_FOLDED_FROM && use_tiles(M, K); }

}  // namespace outrider
