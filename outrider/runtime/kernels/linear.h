// Linear layers with the same input, computed by one parallel loop.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <map>

#include "dots.h"
#include "folded_tiles.h"
#include "grouped.h"
#include "grouped_dots.h"
#include "grouped_tiles.h"
#include "integer_dots.h"
#include "packed.h"
#include "rows.h"
#include "share.h"
#include "tiles.h"

namespace outrider {

// A layer, and which of all outputs its first one is.
struct Layer {
  at::Tensor weight, bias;
  int64_t first, outputs, panels;

  const float* bias_at(int64_t n) const {
    return bias.defined() ? bias.const_data_ptr<float>() + n : nullptr;
  }
};

using Layers = c10::SmallVector<Layer, 4>;

// The panels `first` to `last` of a layer of grouped weights; y's rows are N apart.
inline void multiply_groups(const Layer& layer, const float* x, float* y, int64_t M, int64_t K,
                            int64_t N, int64_t first, int64_t last) {
  const int64_t n = first * kPanel;
  const Target to{y + layer.first + n, N, layer.bias_at(n), layer.outputs - n};
  with_format(layer.weight, K, [&](const auto& panels) {
    multiply_panels(M, x, panels + first, to, last - first);
  });
}

// The same for any other layer.
template <typename W>
void multiply_layer(const Layer& layer, const float* x, float* y, int64_t M, int64_t K, int64_t N,
                    int64_t first, int64_t last) {
  const W* w = layer.weight.const_data_ptr<W>();
  const int64_t n = first * kPanel;
  if (layer.weight.dim() == 3) {
    const Target to{y + layer.first + n, N, layer.bias_at(n), layer.outputs - n};
    multiply_panels(M, x, Panels<W>{w, K} + first, to, last - first);
  } else if constexpr (!std::is_same_v<W, int8_t>) {
    for (int64_t i = n; i < last * kPanel; i += kPanel)
      multiply_rows(x, w, layer.bias_at(0), y + layer.first, M, K, N, i,
                    std::min(layer.outputs, i + kPanel));
  }
}

// Shares the panels of all layers among threads; act gets a layer and some of its panels.
template <typename F>
void share_panels(const Layers& layers, int64_t cost, const F& act) {
  int64_t panels = 0;
  for (const Layer& layer : layers) panels += layer.panels;
  // parts of whole groups of panels, small enough that no thread waits long for the last
  const int64_t part = std::max<int64_t>(4, panels / 32 / 4 * 4);
  share(panels, part, cost, [&](int64_t begin, int64_t end) {
    for (const Layer& layer : layers) {
      const int64_t first = std::max<int64_t>(0, begin), last = std::min(end, layer.panels);
      if (first < last) act(layer, first, last);
      begin -= layer.panels;
      end -= layer.panels;
    }
  });
}

// y = x wᵀ + bias in float32, for all layers side by side, N outputs in all.
inline void multiply(const float* x, float* y, const Layers& layers, int64_t M, int64_t K,
                     int64_t N) {
  share_panels(layers, kPanel * K * M, [&](const Layer& layer, int64_t first, int64_t last) {
    const at::ScalarType dtype = layer.weight.scalar_type();
    const auto act = layer.weight.dim() == 4  ? multiply_groups
                     : dtype == at::kChar     ? multiply_layer<int8_t>
                     : dtype == at::kBFloat16 ? multiply_layer<BFloat16>
                                              : multiply_layer<float>;
    act(layer, x, y, M, K, N, first, last);
  });
}

// Which kernel takes bfloat16 inputs without widening them.
enum class Pairs { kNone, kDots, kTiles, kGroups };

// The kernel for M tokens of K bfloat16 inputs; exact layers take only kernels whose sums do not
// depend on M.
inline Pairs pairs_for(const Layers& layers, int64_t M, int64_t K, bool exact) {
  if (!kHasDots && !kHasTiles) return Pairs::kNone;
  auto all = [&](auto&& is) { return std::all_of(layers.begin(), layers.end(), is); };
  if (all([](const Layer& layer) {
        return layer.weight.dim() == 3 && layer.weight.scalar_type() == at::kBFloat16;
      })) {
    if (!exact && use_tiles(M, K)) return Pairs::kTiles;
    return kHasDots ? Pairs::kDots : Pairs::kNone;
  }
  const bool wide = kHasDots && !exact && M >= OUTRIDER_GROUPS_FROM;
  return wide && all([](const Layer& layer) { return layer.weight.dim() == 4; }) ? Pairs::kGroups
                                                                                 : Pairs::kNone;
}

// multiply() for bfloat16 inputs and results.
inline void multiply_pairs(Pairs kernel, const BFloat16* x, BFloat16* y, const Layers& layers,
                           int64_t M, int64_t K, int64_t N) {
  const int64_t words = words_of(K);
  const at::Tensor storage = at::empty({M, words}, at::TensorOptions().dtype(at::kInt));
  int32_t* paired = storage.mutable_data_ptr<int32_t>();
  for (int64_t m = 0; m < M; m++) pair_up(x + m * K, K, paired + m * words);
  const PairedInputs inputs{paired, words};
  share_panels(layers, kPanel * K * M / 2, [&](const Layer& layer, int64_t first, int64_t last) {
    const int64_t n = first * kPanel;
    const NarrowTarget to{y + layer.first + n, N, layer.bias_at(n), layer.outputs - n};
    if (kernel == Pairs::kGroups) {
      return with_format(layer.weight, K, [&](const auto& panels) {
        if (use_folded(M, K)) return multiply_folded(M, inputs, panels + first, to, last - first);
        thread_local std::vector<float> totals;
        totals.resize(M * (K / panels.group));
        if (panels.kOffset) add_groups(x, M, K, panels.group, totals.data());
        const bool tiles = panels.group % (2 * kBlock) == 0 && use_tiles(M, K);
        const auto multiply = tiles ? multiply_group_tiles<std::decay_t<decltype(panels)>>
                                    : multiply_group_dots<std::decay_t<decltype(panels)>>;
        multiply(M, inputs, totals.data(), panels + first, to, last - first);
      });
    }
    const auto multiply = kernel == Pairs::kTiles ? multiply_tiles<NarrowTarget> : multiply_dots<NarrowTarget>;
    multiply(M, inputs, Panels<BFloat16>{layer.weight.const_data_ptr<BFloat16>(), K} + first, to,
             last - first);
  });
}

// Inputs that are rounded to 8 bits, and as pairs where they are multiplied by folded weights.
struct SharedInputs {
  RoundedTokens rounded;
  at::Tensor pairs;

  template <typename T>
  SharedInputs(const T* x, int64_t M, int64_t K, int64_t group, bool folded)
      : rounded(x, M, K, group) {
    if (!folded) return;
    pairs = at::empty({M, words_of(K)}, at::TensorOptions().dtype(at::kInt));
    for (int64_t m = 0; m < M; m++)
      pair_up_rounded(rounded.inputs().from(m), pairs.mutable_data_ptr<int32_t>() + m * words_of(K));
  }
};

// multiply() for weights of few bits and inputs that are rounded to 8 bits, in float32 or bfloat16.
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
    const int64_t n = first * kPanel;
    const TargetOf<T> to{y + layer.first + n, N, layer.bias_at(n), layer.outputs - n};
    const SharedInputs& inputs = shared.at(layer.weight.size(1));
    const Format format(layer.weight, K);
    const int8_t* bytes = layer.weight.const_data_ptr<int8_t>();
    auto run = [&](const auto& panels) {
      if (folds) {
        const PairedInputs pairs{inputs.pairs.template const_data_ptr<int32_t>(), words_of(K)};
        return multiply_folded(M, pairs, panels + first, to, last - first);
      }
      multiply_integers(M, inputs.rounded.inputs(), panels + first, to, last - first);
    };
    if (format.bits == 8) return run(IntegerPanels<8, false>{bytes, K, format.group});
    if (format.offset) return run(IntegerPanels<4, true>{bytes, K, format.group});
    run(IntegerPanels<4, false>{bytes, K, format.group});
  });
}

}  // namespace outrider
