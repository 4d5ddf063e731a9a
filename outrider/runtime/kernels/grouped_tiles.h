// A linear layer over weights of 8 or 4 bits in groups and bfloat16 inputs, by the processor's matrix
// unit. It computes what grouped_dots.h does, in another order of sums.

#pragma once

#include "grouped_dots.h"
#include "tiles.h"

namespace outrider {

#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512BF16__)

// One panel for up to 16 tokens; `totals` has the sum of each group of inputs.
inline void group_block(const PairedInputs& x, const float* totals, const PairedPanel& panel,
                        const NarrowTarget& to, int64_t tokens) {
  const int64_t groups = panel.words / panel.group_words, stride = x.words * sizeof(int32_t);
  alignas(64) float parts[2][kBlock * kBlock], sums[2][kBlock * kBlock];
  std::fill_n(&sums[0][0], 2 * kBlock * kBlock, 0.f);
  for (int64_t g = 0; g < groups; g++) {
    TILE_ZERO(0);
    TILE_ZERO(1);
    for (int64_t k = g * panel.group_words; k < (g + 1) * panel.group_words; k += kBlock) {
      const BFloat16* integers = panel.integers + 2 * k * kPanel;
      TILE_LOAD(4, x.row(0) + k, stride);
      TILE_LOAD(6, integers, kPanelRow);
      TILE_MULTIPLY(0, 4, 6);
      TILE_LOAD(7, integers + 2 * kBlock, kPanelRow);
      TILE_MULTIPLY(1, 4, 7);
    }
    TILE_STORE(0, parts[0], kBlock * sizeof(float));
    TILE_STORE(1, parts[1], kBlock * sizeof(float));
    for (int64_t half = 0; half < 2; half++) {
      const int64_t at = g * kPanel + half * kLanes;
      const V scale = V::loadu(panel.scales + at);
      for (int64_t m = 0; m < tokens; m++) {
        float* sum = sums[half] + m * kBlock;
        V total = at::vec::fmadd(V::loadu(parts[half] + m * kBlock), scale, V::loadu(sum));
        if (panel.offsets)
          total = at::vec::fmadd(V(totals[m * groups + g]), V::loadu(panel.offsets + at), total);
        total.store(sum);
      }
    }
  }
  for (int64_t half = 0; half < 2; half++)
    for (int64_t m = 0; m < tokens; m++)
      store_half(V::loadu(sums[half] + m * kBlock), to, m, half * kBlock);
}

// Any number of tokens; beyond 16, the last block overlaps the one before it.
template <typename Grouped>
void multiply_group_tiles(int64_t M, const PairedInputs& x, const float* totals,
                          const Grouped& panels, const NarrowTarget& to, int64_t count) {
  const int64_t tokens = std::min(M, kBlock), groups = panels.K / panels.group;
  [[maybe_unused]] const TileConfiguration configuration(tokens, 0);
  for (int64_t p = 0; p < count; p++) {
    const PairedPanel panel = paired(panels + p);
    for (int64_t m = 0; m < M; m += kBlock) {
      const int64_t first = std::min(m, M - tokens);
      group_block({x.row(first), x.words}, totals + first * groups, panel, to.at(first, p * kPanel),
                  tokens);
    }
  }
}

#else

template <typename Grouped>
void multiply_group_tiles(int64_t, const PairedInputs&, const float*, const Grouped&,
                          const NarrowTarget&, int64_t) {}

#endif

}  // namespace outrider
