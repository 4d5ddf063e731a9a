#include "few_bits.h"

#include <map>
#include <vector>

#include "buffer.h"
#include "folded_tiles.h"
#include "grouped.h"
#include "grouped_dots.h"
#include "grouped_tiles.h"
#include "integer_dots.h"
#include "tiles.h"

namespace outrider {

namespace {

template <typename T>
TargetOf<T> target_of(const Layer& layer, T* y, int64_t N, int64_t first) {
  const int64_t n = first * kPanel;
  return {y + layer.first + n, N, layer.bias_at(n), layer.outputs - n};
}

void multiply(const Layer& layer, const float* x, float* y, int64_t M, int64_t K, int64_t N,
              int64_t first, int64_t last) {
  auto by = [&](const auto& panels) {
    multiply_panels(M, x, panels + first, target_of(layer, y, N, first), last - first);
  };
  if (layer.weight.dim() == 4) return with_format(layer.weight, K, by);
  by(Panels<int8_t>{layer.weight.const_data_ptr<int8_t>(), K});
}

void multiply_pairs(const Layer& layer, const BFloat16* x, const PairedInputs& pairs, BFloat16* y,
                    int64_t M, int64_t K, int64_t N, int64_t first, int64_t last) {
  const auto to = target_of(layer, y, N, first);
  with_format(layer.weight, K, [&](const auto& panels) {
    if (use_folded(M, K)) return multiply_folded(M, pairs, panels + first, to, last - first);
    thread_local std::vector<float> totals;
    totals.resize(M * (K / panels.group));
    if (panels.kOffset) add_groups(x, M, K, panels.group, totals.data());
    const bool tiles = panels.group % (2 * kBlock) == 0 && use_tiles(M, K);
    const auto multiply = tiles ? multiply_group_tiles<std::decay_t<decltype(panels)>>
                                : multiply_group_dots<std::decay_t<decltype(panels)>>;
    multiply(M, pairs, totals.data(), panels + first, to, last - first);
  });
}

// Inputs that are rounded to 8 bits, and as pairs where they are multiplied by folded weights.
struct SharedInputs {
  RoundedTokens rounded;
  Buffer<int32_t> pairs;

  template <typename T>
  SharedInputs(const T* x, int64_t M, int64_t K, int64_t group, bool folded)
      : rounded(x, M, K, group) {
    if (!folded) return;
    pairs = Buffer<int32_t>(M * words_of(K));
    for (int64_t m = 0; m < M; m++)
      pair_up_rounded(rounded.inputs().from(m), pairs.data() + m * words_of(K));
  }
};

template <typename T>
void multiply_rounded(const T* x, T* y, const Layers& layers, int64_t M, int64_t K, int64_t N,
                      bool exact) {
  const bool folds = std::is_same_v<T, BFloat16> && !exact && use_folded(M, K);
  std::map<int64_t, SharedInputs> shared;  // by the number of groups, which layers may share
  for (const Layer& layer : layers) {
    const int64_t groups = layer.weight.size(1);
    if (!shared.contains(groups)) shared.try_emplace(groups, x, M, K, K / groups, folds);
  }
  share_panels(layers, kPanel * K * M / 4, [&](const Layer& layer, int64_t first, int64_t last) {
    const auto to = target_of(layer, y, N, first);
    const SharedInputs& inputs = shared.at(layer.weight.size(1));
    const Format format(layer.weight, K);
    const int8_t* bytes = layer.weight.const_data_ptr<int8_t>();
    auto run = [&](const auto& panels) {
      if (folds) {
        const PairedInputs pairs{inputs.pairs.data(), words_of(K)};
        return multiply_folded(M, pairs, panels + first, to, last - first);
      }
      multiply_integers(M, inputs.rounded.inputs(), panels + first, to, last - first);
    };
    if (format.bits == 8) return run(IntegerPanels<8, false>{bytes, K, format.group});
    if (format.offset) return run(IntegerPanels<4, true>{bytes, K, format.group});
    run(IntegerPanels<4, false>{bytes, K, format.group});
  });
}

const FewBits kLibrary{multiply, multiply_pairs, multiply_rounded<float>,
                       multiply_rounded<BFloat16>};
[[maybe_unused]] const bool loaded = (few_bits = &kLibrary, true);

}  // namespace

}  // namespace outrider
