// Linear layers for forward passes over few tokens, on a CPU.
//
// The order of every sum depends on the model alone. So a token's result has the same bits whether
// it is computed alone, inside a draft, a tree or a batch, and however long the KV buffers are.

#include <algorithm>
#include <numeric>

#include "buffer.h"
#include "dots.h"
#include "few_bits.h"
#include "joined_layers.h"
#include "kernels.h"
#include "packed.h"
#include "rows.h"
#include "tiles.h"

namespace outrider {

const FewBits* few_bits = nullptr;

namespace {

const FewBits& of_few_bits() {
  TORCH_CHECK(few_bits, "the kernels for weights of few bits are not loaded");
  return *few_bits;
}

// The panels `first` to `last` of a layer; y's rows are N apart.
template <typename W>
void multiply_layer(const Layer& layer, const float* x, float* y, int64_t M, int64_t K, int64_t N,
                    int64_t first, int64_t last) {
  const W* w = layer.weight.const_data_ptr<W>();
  const int64_t n = first * kPanel;
  if (layer.weight.dim() == 3) {
    const Target to{y + layer.first + n, N, layer.bias_at(n), layer.outputs - n};
    multiply_panels(M, x, Panels<W>{w, K} + first, to, last - first);
  } else {
    for (int64_t i = n; i < last * kPanel; i += kPanel)
      multiply_rows(x, w, layer.bias_at(0), y + layer.first, M, K, N, i,
                    std::min(layer.outputs, i + kPanel));
  }
}

// y = x wᵀ + bias in float32, for all layers side by side, N outputs in all.
void multiply(const float* x, float* y, const Layers& layers, int64_t M, int64_t K, int64_t N) {
  share_panels(layers, kPanel * K * M, [&](const Layer& layer, int64_t first, int64_t last) {
    const c10::ScalarType dtype = layer.weight.scalar_type();
    const auto act = dtype == c10::kChar       ? of_few_bits().multiply
                     : dtype == c10::kBFloat16 ? multiply_layer<BFloat16>
                                              : multiply_layer<float>;
    act(layer, x, y, M, K, N, first, last);
  });
}

// Which kernel takes bfloat16 inputs without widening them.
enum class Pairs { kNone, kDots, kTiles, kGroups };

// The kernel for M tokens of K bfloat16 inputs; exact layers take only kernels whose sums do not
// depend on M.
Pairs pairs_for(const Layers& layers, int64_t M, int64_t K, bool exact) {
  if (!kHasDots && !kHasTiles) return Pairs::kNone;
  auto all = [&](auto&& is) { return std::all_of(layers.begin(), layers.end(), is); };
  if (all([](const Layer& layer) {
        return layer.weight.dim() == 3 && layer.weight.scalar_type() == c10::kBFloat16;
      })) {
    if (!exact && use_tiles(M, K)) return Pairs::kTiles;
    return kHasDots ? Pairs::kDots : Pairs::kNone;
  }
  const bool wide = kHasDots && !exact && M >= OUTRIDER_GROUPS_FROM;
  return wide && all([](const Layer& layer) { return layer.weight.dim() == 4; }) ? Pairs::kGroups
                                                                                 : Pairs::kNone;
}

// multiply() for bfloat16 inputs and results.
void multiply_pairs(Pairs kernel, const BFloat16* x, BFloat16* y, const Layers& layers, int64_t M,
                    int64_t K, int64_t N) {
  const int64_t words = words_of(K);
  const Buffer<int32_t> paired(M * words);
  for (int64_t m = 0; m < M; m++) pair_up(x + m * K, K, paired.data() + m * words);
  const PairedInputs inputs{paired.data(), words};
  share_panels(layers, kPanel * K * M / 2, [&](const Layer& layer, int64_t first, int64_t last) {
    if (kernel == Pairs::kGroups)
      return of_few_bits().multiply_pairs(layer, x, inputs, y, M, K, N, first, last);
    const int64_t n = first * kPanel;
    const NarrowTarget to{y + layer.first + n, N, layer.bias_at(n), layer.outputs - n};
    const auto multiply =
        kernel == Pairs::kTiles ? multiply_tiles<NarrowTarget> : multiply_dots<NarrowTarget>;
    multiply(M, inputs, Panels<BFloat16>{layer.weight.const_data_ptr<BFloat16>(), K} + first, to,
             last - first);
  });
}

// The result of layers that round their inputs.
Tensor rounded_linears(const Tensor& x, const Layers& layers, Sizes sizes, int64_t M, int64_t K,
                       bool exact) {
  const bool narrow = x.scalar_type() == c10::kBFloat16;
  const Tensor input = contiguous(x, narrow ? c10::kBFloat16 : c10::kFloat);
  Tensor out = allocate(sizes, input.scalar_type());
  const auto by = [&](auto multiply, const auto* from, auto* to) {
    multiply(from, to, layers, M, K, sizes.back(), exact);
  };
  if (narrow)
    by(of_few_bits().multiply_rounded_narrow, input.const_data_ptr<BFloat16>(),
       out.mutable_data_ptr<BFloat16>());
  else
    by(of_few_bits().multiply_rounded, input.const_data_ptr<float>(),
       out.mutable_data_ptr<float>());
  return converted(std::move(out), x.scalar_type());
}

}  // namespace

Tensor linears(const Tensor& x, Tensors weights, Tensors biases, Sizes outputs, int64_t widest) {
  const int64_t K = x.size(-1), M = x.numel() / K;
  if (M > widest && weights[0].dim() == 2) return linears_by_torch(x, weights, biases);
  const int64_t N = std::accumulate(outputs.begin(), outputs.end(), int64_t{0});
  c10::SmallVector<int64_t, 4> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = N;
  Layers layers;
  int64_t first = 0;
  for (size_t i = 0; i < weights.size(); i++) {
    layers.push_back({contiguous(weights[i], weights[i].scalar_type()),
                      biases.empty() ? Tensor() : contiguous(biases[i], c10::kFloat), first,
                      outputs[i], (outputs[i] + kPanel - 1) / kPanel});
    first += outputs[i];
  }
  const bool exact = widest >= kAnyNumber;
  if (weights[0].dim() == 5) return rounded_linears(x, layers, sizes, M, K, exact);
  const Pairs kernel =
      x.scalar_type() == c10::kBFloat16 ? pairs_for(layers, M, K, exact) : Pairs::kNone;
  if (kernel != Pairs::kNone) {
    Tensor out = allocate(sizes, c10::kBFloat16);
    const Tensor input = contiguous(x, c10::kBFloat16);
    multiply_pairs(kernel, input.const_data_ptr<BFloat16>(), out.mutable_data_ptr<BFloat16>(),
                   layers, M, K, N);
    return out;
  }
  Tensor out = allocate(sizes, c10::kFloat);
  const Tensor input = contiguous(x, c10::kFloat);
  multiply(input.const_data_ptr<float>(), out.mutable_data_ptr<float>(), layers, M, K, N);
  return converted(std::move(out), x.scalar_type());
}

Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias, int64_t outputs,
              int64_t widest) {
  const Tensors biases = bias.defined() ? Tensors(&bias, 1) : Tensors();
  return linears(x, Tensors(&weight, 1), biases, Sizes(&outputs, 1), widest);
}

}  // namespace outrider

// For packing.py.
extern "C" int64_t outrider_panel_outputs() { return outrider::kPanel; }
