// Linear layers with the same input, computed by one parallel loop.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <algorithm>

#include "grouped.h"
#include "packed.h"
#include "rows.h"
#include "share.h"

namespace outrider {

struct Layer {
  at::Tensor weight, bias;
  float* y;
  int64_t outputs, panels;
};

using Layers = c10::SmallVector<Layer, 4>;

// The panels `first` to `last` of a layer of grouped weights; y's rows are N apart.
inline void multiply_groups(const Layer& layer, const float* x, int64_t M, int64_t K, int64_t N,
                            int64_t first, int64_t last) {
  const float* bias = layer.bias.defined() ? layer.bias.const_data_ptr<float>() : nullptr;
  const int64_t n = first * kPanel;
  const Target to{layer.y + n, N, bias ? bias + n : nullptr, layer.outputs - n};
  with_format(layer.weight, K, [&](const auto& panels) {
    multiply_panels(M, x, panels + first, to, last - first);
  });
}

// The same for any other layer.
template <typename W>
void multiply_layer(const Layer& layer, const float* x, int64_t M, int64_t K, int64_t N,
                    int64_t first, int64_t last) {
  const W* w = layer.weight.const_data_ptr<W>();
  const float* bias = layer.bias.defined() ? layer.bias.const_data_ptr<float>() : nullptr;
  const int64_t n = first * kPanel;
  if (layer.weight.dim() == 3) {
    const Target to{layer.y + n, N, bias ? bias + n : nullptr, layer.outputs - n};
    multiply_panels(M, x, Panels<W>{w, K} + first, to, last - first);
  } else if constexpr (!std::is_same_v<W, int8_t>) {
    for (int64_t i = n; i < last * kPanel; i += kPanel)
      multiply_rows(x, w, bias, layer.y, M, K, N, i, std::min(layer.outputs, i + kPanel));
  }
}

inline void multiply(const float* x, const Layers& layers, int64_t M, int64_t K, int64_t N) {
  int64_t panels = 0;
  for (const Layer& layer : layers) panels += layer.panels;
  // parts of whole groups of panels, small enough that no thread waits long for the last
  const int64_t part = std::max<int64_t>(4, panels / 32 / 4 * 4);
  share(panels, part, kPanel * K * M, [&](int64_t begin, int64_t end) {
    for (const Layer& layer : layers) {
      const int64_t first = std::max<int64_t>(0, begin), last = std::min(end, layer.panels);
      if (first < last) {
        const at::ScalarType dtype = layer.weight.scalar_type();
        const auto act = layer.weight.dim() == 4  ? multiply_groups
                         : dtype == at::kChar     ? multiply_layer<int8_t>
                         : dtype == at::kBFloat16 ? multiply_layer<BFloat16>
                                                  : multiply_layer<float>;
        act(layer, x, M, K, N, first, last);
      }
      begin -= layer.panels;
      end -= layer.panels;
    }
  });
}

}  // namespace outrider
