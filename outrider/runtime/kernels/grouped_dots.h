// A linear layer over weights of 8 or 4 bits in groups and bfloat16 inputs, by the instruction that
// multiplies pairs of bfloat16 numbers.
//
// The integers of a weight are exact in bfloat16, so no weight is rounded: the integers of a group
// are multiplied and added, and their sum is multiplied by the group's scale; an offset is multiplied
// by the sum of the group's inputs. That is another order of sums than that of grouped.h, which
// serves exact models and passes of few tokens.

#pragma once

#include <vector>

#include "dots.h"
#include "grouped.h"

namespace outrider {

// A panel with its integers as pairs in bfloat16, and its scales and offsets, kPanel per group.
struct PairedPanel {
  const BFloat16* integers;
  const float *scales, *offsets;
  int64_t words, group_words;
};

#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512BF16__)

constexpr int64_t kGroupTile = 4;  // tokens whose two sets of sums fit into the registers

inline __m512i upper_halves(const V& first, const V& second) {
  const __m512i one = _mm512_castps_si512(first), other = _mm512_castps_si512(second);
  return _mm512_or_si512(_mm512_and_si512(one, _mm512_set1_epi32(0xffff0000)),
                         _mm512_srli_epi32(other, 16));
}

// Unpacks a panel to buffers of this thread that the next call overwrites.
template <int Bits, bool Offset>
PairedPanel paired(const GroupedPanels<Bits, Offset>& panel) {
  thread_local std::vector<BFloat16> integers;
  thread_local std::vector<float> scales, offsets;
  const int64_t groups = panel.K / panel.group;
  integers.resize(panel.K * kPanel);
  scales.resize(groups * kPanel), offsets.resize(groups * kPanel);
  BFloat16* to = integers.data();
  const int8_t* from = panel.bytes;
  for (int64_t g = 0; g < groups; g++) {
    const Affine<Offset> affine(from);
    affine.scale.low.store(&scales[g * kPanel]);
    affine.scale.high.store(&scales[g * kPanel + kLanes]);
    if constexpr (Offset) {
      affine.offset.low.store(&offsets[g * kPanel]);
      affine.offset.high.store(&offsets[g * kPanel + kLanes]);
    }
    from += panel.kHead;
    for (int64_t k = 0; k < panel.group; k += kStep, from += panel.kStepBytes) {
      const Step<Bits, Offset> step(from);
#pragma GCC unroll 4
      for (int i = 0; i < kStep; i += 2, to += 2 * kPanel) {
        const Pair first = step.at(i), second = step.at(i + 1);
        _mm512_storeu_si512(to, upper_halves(first.low, second.low));
        _mm512_storeu_si512(to + kPanel, upper_halves(first.high, second.high));
      }
    }
  }
  return {integers.data(), scales.data(), Offset ? offsets.data() : nullptr, panel.K / 2,
          panel.group / 2};
}

// y = x wᵀ + bias for M tokens; `totals` has the sum of each group of inputs, for M tokens.
template <int M>
inline void group_tile(const int32_t* x, const float* totals, const PairedPanel& panel,
                       const NarrowTarget& to) {
  const int64_t groups = panel.words / panel.group_words;
  __m512 sums[M][2];
  for (int m = 0; m < M; m++) sums[m][0] = sums[m][1] = _mm512_setzero_ps();
  for (int64_t g = 0; g < groups; g++) {
    __m512 parts[M][2];
    for (int m = 0; m < M; m++) parts[m][0] = parts[m][1] = _mm512_setzero_ps();
    for (int64_t k = g * panel.group_words; k < (g + 1) * panel.group_words; k++) {
      const BFloat16* from = panel.integers + 2 * k * kPanel;
      const __m512bh low = load_words(from), high = load_words(from + kPanel);
#pragma GCC unroll 4
      for (int m = 0; m < M; m++) {
        const __m512bh input = words(x + m * panel.words + k);
        parts[m][0] = _mm512_dpbf16_ps(parts[m][0], input, low);
        parts[m][1] = _mm512_dpbf16_ps(parts[m][1], input, high);
      }
    }
    for (int half = 0; half < 2; half++) {
      const int64_t at = g * kPanel + half * kLanes;
      const __m512 scale = _mm512_loadu_ps(panel.scales + at);
      for (int m = 0; m < M; m++)
        sums[m][half] = _mm512_fmadd_ps(parts[m][half], scale, sums[m][half]);
      if (!panel.offsets) continue;
      const __m512 offset = _mm512_loadu_ps(panel.offsets + at);
      for (int m = 0; m < M; m++)
        sums[m][half] =
            _mm512_fmadd_ps(_mm512_set1_ps(totals[m * groups + g]), offset, sums[m][half]);
    }
  }
  for (int m = 0; m < M; m++)
    for (int half = 0; half < 2; half++) store_half(V(sums[m][half]), to, m, half * kLanes);
}

// Any number of tokens, in tiles of nearly equal size.
template <typename Grouped>
void multiply_group_dots(int64_t M, const PairedInputs& x, const float* totals,
                         const Grouped& panels, const NarrowTarget& to, int64_t count) {
  const int64_t tiles = (M + kGroupTile - 1) / kGroupTile, groups = panels.K / panels.group;
  for (int64_t p = 0; p < count; p++) {
    const PairedPanel panel = paired(panels + p);
    for (int64_t i = 0; i < tiles; i++) {
      const int64_t first = M * i / tiles, last = M * (i + 1) / tiles;
      with_tokens<kGroupTile>(last - first, [&](auto tokens) {
        group_tile<tokens>(x.row(first), totals + first * groups, panel, to.at(first, p * kPanel));
      });
    }
  }
}

#else

template <typename Grouped>
void multiply_group_dots(int64_t, const PairedInputs&, const float*, const Grouped&,
                         const NarrowTarget&, int64_t) {}

#endif

// Sums of groups of inputs, (M, K / group).
inline void add_groups(const BFloat16* x, int64_t M, int64_t K, int64_t group, float* to) {
  for (int64_t i = 0; i < M * (K / group); i++, x += group) {
    float sum = 0;
    for (int64_t k = 0; k < group; k++) sum += static_cast<float>(x[k]);
    to[i] = sum;
  }
}

}  // namespace outrider
