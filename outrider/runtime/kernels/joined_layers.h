// Linear layers with the same input, whose outputs lie side by side.

#pragma once

#include <c10/util/SmallVector.h>

#include <algorithm>

#include "share.h"
#include "tensor.h"

namespace outrider {

// A layer, and which of all outputs its first one is.
struct Layer {
  Tensor weight, bias;
  int64_t first, outputs, panels;

  const float* bias_at(int64_t n) const {
    return bias.defined() ? bias.const_data_ptr<float>() + n : nullptr;
  }
};

using Layers = c10::SmallVector<Layer, 4>;

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

}  // namespace outrider
