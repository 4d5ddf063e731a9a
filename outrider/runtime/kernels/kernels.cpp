// Linear layers for forward passes over few tokens, on a CPU, and the names of all operators.
//
// The order of every sum depends on the model alone. So a token's result has the same bits whether
// it is computed alone, inside a draft, a tree or a batch, and however long the KV buffers are.

#include "kernels.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <torch/library.h>

#include <numeric>
#include <vector>

#include "elementwise.h"
#include "linear.h"
#include "move_slots.h"
#include "pages.h"
#include "truncate.h"

namespace outrider {

at::Tensor linears(const at::Tensor& x, at::TensorList weights, at::TensorList biases,
                   at::IntArrayRef outputs, int64_t widest) {
  const int64_t K = x.size(-1), M = x.numel() / K;
  if (M > widest && weights[0].dim() == 2) {
    std::vector<at::Tensor> results;
    for (size_t i = 0; i < weights.size(); i++)
      results.push_back(at::linear(x, weights[i].to(x.scalar_type()),
                                   biases.empty() ? std::nullopt : std::optional(biases[i])));
    return results.size() == 1 ? results[0] : at::cat(results, -1);
  }
  const int64_t N = std::accumulate(outputs.begin(), outputs.end(), int64_t{0});
  c10::SmallVector<int64_t, 4> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = N;
  Layers layers;
  int64_t first = 0;
  for (size_t i = 0; i < weights.size(); i++) {
    const at::Tensor bias = biases.empty() ? at::Tensor() : biases[i].to(at::kFloat).contiguous();
    layers.push_back({weights[i].contiguous(), bias, first, outputs[i],
                      (outputs[i] + kPanel - 1) / kPanel});
    first += outputs[i];
  }
  const bool narrow = x.scalar_type() == at::kBFloat16;
  if (weights[0].dim() == 5) {
    const at::Tensor input = (narrow ? x : x.to(at::kFloat)).contiguous();
    at::Tensor out = at::empty(sizes, input.options());
    auto run = [&]<typename T>(const T* from, T* to) {
      multiply_rounded(from, to, layers, M, K, N, widest >= kAnyNumber);
    };
    if (narrow) run(input.const_data_ptr<BFloat16>(), out.mutable_data_ptr<BFloat16>());
    else run(input.const_data_ptr<float>(), out.mutable_data_ptr<float>());
    return out.to(x.scalar_type());
  }
  const Pairs kernel = x.scalar_type() == at::kBFloat16
                           ? pairs_for(layers, M, K, widest >= kAnyNumber)
                           : Pairs::kNone;
  if (kernel != Pairs::kNone) {
    at::Tensor out = at::empty(sizes, x.options());
    const at::Tensor input = x.contiguous();
    multiply_pairs(kernel, input.const_data_ptr<BFloat16>(), out.mutable_data_ptr<BFloat16>(),
                   layers, M, K, N);
    return out;
  }
  at::Tensor out = at::empty(sizes, x.options().dtype(at::kFloat));
  const at::Tensor input = x.to(at::kFloat).contiguous();
  multiply(input.const_data_ptr<float>(), out.mutable_data_ptr<float>(), layers, M, K, N);
  return out.to(x.scalar_type());
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight,
                  const std::optional<at::Tensor>& bias, int64_t outputs, int64_t widest) {
  return linears(x, weight, bias ? at::TensorList(*bias) : at::TensorList(), outputs, widest);
}

// Packs weights (N, K) as packed.h reads them, (⌈N / kPanel⌉, K, kPanel): in bfloat16, with an even
// number of inputs, where that loses nothing, unless the dtype is to be kept.
static at::Tensor pack(const at::Tensor& weight, bool keep_dtype) {
  const int64_t N = weight.size(0), K = weight.size(1), panels = (N + kPanel - 1) / kPanel;
  const at::Tensor narrow = weight.to(at::kBFloat16);
  const bool lossless = !keep_dtype && narrow.to(weight.scalar_type()).equal(weight);
  const at::Tensor kept = lossless ? narrow : weight;
  const bool pairs = kept.scalar_type() == at::kBFloat16;
  const int64_t rows = pairs ? K + K % 2 : K, count = pairs ? 2 : 1;
  const at::Tensor padded =
      at::constant_pad_nd(kept, {0, rows - K, 0, panels * kPanel - N});
  const at::Tensor split = padded.view({panels, kPanel, rows / count, count}).flip({3});
  return split.permute({0, 2, 1, 3}).reshape({panels, rows, kPanel}).contiguous();
}

// Packs 8-bit integers (N, K) and their scales (N,) to (⌈N / kPanel⌉, K + 4, kPanel).
static at::Tensor pack_int8(const at::Tensor& weight, const at::Tensor& scale) {
  const int64_t N = weight.size(0), K = weight.size(1), panels = (N + kPanel - 1) / kPanel;
  const int64_t more = panels * kPanel - N;
  const at::Tensor padded = at::constant_pad_nd(weight, {0, 0, 0, more});
  const at::Tensor values = padded.view({panels, kPanel, K}).transpose(1, 2);
  const at::Tensor scales = at::constant_pad_nd(scale.to(at::kFloat), {0, more}).view(at::kChar);
  return at::cat({values, scales.view({panels, -1, kPanel})}, 1);
}

// Pads the outputs, the first dimension, with zeros to whole panels.
static at::Tensor pad_outputs(const at::Tensor& x) {
  std::vector<int64_t> more(2 * x.dim(), 0);
  more.back() = (x.size(0) + kPanel - 1) / kPanel * kPanel - x.size(0);
  return at::constant_pad_nd(x, more);
}

// The sizes of integers (N, K) whose groups have the scales (N, groups).
struct Groups {
  int64_t panels, groups, group;

  Groups(const at::Tensor& values, const at::Tensor& scale, int64_t bits)
      : panels((values.size(0) + kPanel - 1) / kPanel),
        groups(scale.size(1)),
        group(values.size(1) / groups) {
    TORCH_CHECK(bits == 8 || bits == 4, "integers of ", bits, " bits cannot be packed");
    TORCH_CHECK(group * groups == values.size(1) && group % kStep == 0, values.size(1),
                " inputs are not ", groups, " groups of a multiple of ", kStep);
  }
};

// Scales and maybe offsets (N, groups) as rows of bytes of float16 numbers.
static std::vector<at::Tensor> pack_numbers(const Groups& size, const at::Tensor& scale,
                                            const std::optional<at::Tensor>& offset) {
  std::vector<at::Tensor> rows;
  for (const auto& numbers : {std::optional(scale), offset}) {
    if (!numbers) continue;
    const at::Tensor split =
        pad_outputs(numbers->to(at::kHalf)).view({size.panels, kPanel, size.groups});
    rows.push_back(split.transpose(1, 2).contiguous().view(at::kChar).view(
        {size.panels, size.groups, -1, kPanel}));
  }
  return rows;
}

// Packs integers (N, K) of 8 or 4 bits, with scales and maybe offsets (N, groups) of float16, as
// grouped.h reads them.
static at::Tensor pack_groups(const at::Tensor& values, const at::Tensor& scale,
                              const std::optional<at::Tensor>& offset, int64_t bits) {
  const Groups size(values, scale, bits);
  std::vector<at::Tensor> parts = pack_numbers(size, scale, offset);
  if (bits == 8) {
    const at::Tensor split = pad_outputs(values).view({size.panels, kPanel, size.groups, -1});
    parts.push_back(split.permute({0, 2, 3, 1}));
  } else {
    const at::Tensor nibbles = (offset ? values : values.add(8)).to(at::kInt);
    const at::Tensor eights =
        pad_outputs(nibbles).view({size.panels, kPanel, size.groups, -1, kStep});
    at::Tensor words = eights.select(-1, 0);
    for (int64_t i = 1; i < kStep; i++)
      words = words.bitwise_or(eights.select(-1, i).__lshift__(4 * i));
    const at::Tensor ordered = words.permute({0, 2, 3, 1}).contiguous();
    parts.push_back(ordered.view(at::kChar).view({size.panels, size.groups, -1, kPanel}));
  }
  return at::cat(parts, 2);
}

// The same as integer_dots.h reads them.
static at::Tensor pack_integer_dots(const at::Tensor& values, const at::Tensor& scale,
                                    const std::optional<at::Tensor>& offset, int64_t bits) {
  const Groups size(values, scale, bits);
  TORCH_CHECK(size.group % kChunk == 0, "groups of ", size.group, " inputs are no multiple of ",
              kChunk);
  TORCH_CHECK(bits == 4 || !offset, "integers of 8 bits with offsets cannot be packed");
  std::vector<at::Tensor> parts = pack_numbers(size, scale, offset);
  const int64_t bias = bits == 4 && offset ? 0 : 1 << (bits - 1);
  const at::Tensor shifted = pad_outputs(values.to(at::kInt).add(bias));
  const int64_t count = bits == 8 ? 1 : 2;  // fours of inputs in a word
  const at::Tensor fours =
      shifted.view({size.panels, kPanel, size.groups, -1, count, 4}).to(at::kByte);
  at::Tensor bytes = fours.select(-2, 0);
  if (bits == 4) bytes = bytes.bitwise_or(fours.select(-2, 1).__lshift__(4));
  const at::Tensor ordered = bytes.permute({0, 2, 3, 1, 4}).contiguous();
  parts.push_back(ordered.view(at::kChar).view({size.panels, size.groups, -1, kPanel}));
  return at::cat(parts, 2).unsqueeze(-1);
}

}  // namespace outrider

TORCH_LIBRARY(outrider, library) {
  library.def(
      "linear(Tensor x, Tensor weight, Tensor? bias, int outputs, int widest) -> Tensor");
  library.def(
      "linears(Tensor x, Tensor[] weights, Tensor[] biases, int[] outputs, int widest) -> Tensor");
  library.def("attend(Tensor q, Tensor k, Tensor v, Tensor mask, float scale, "
              "int widest=9223372036854775807) -> Tensor");
  library.def("pack(Tensor weight, bool keep_dtype) -> Tensor");
  library.def("pack_int8(Tensor weight, Tensor scale) -> Tensor");
  library.def("pack_groups(Tensor values, Tensor scale, Tensor? offset, int bits) -> Tensor");
  library.def(
      "pack_integer_dots(Tensor values, Tensor scale, Tensor? offset, int bits) -> Tensor");
  library.def("pages(int bytes) -> Tensor", &outrider::pages);
#define DEFINE(name) library.def(#name "(Tensor x) -> Tensor");
  OUTRIDER_FUNCTIONS(DEFINE)
  library.def("mean(Tensor x, bool keepdim) -> Tensor");
  library.def("layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor");
  library.def(
      "truncated(Tensor p, Tensor top_k, Tensor top_p, Tensor strict, Tensor min_p) -> Tensor");
  library.def("move_slots(Tensor(a!)[] buffers, int[] lengths, Tensor index, int first) -> ()");
}

TORCH_LIBRARY_IMPL(outrider, CPU, library) {
  library.impl("linear", &outrider::linear);
  library.impl("linears", &outrider::linears);
  library.impl("attend", &outrider::attend);
  library.impl("pack", &outrider::pack);
  library.impl("pack_int8", &outrider::pack_int8);
  library.impl("pack_groups", &outrider::pack_groups);
  library.impl("pack_integer_dots", &outrider::pack_integer_dots);
#define IMPLEMENT(name) library.impl(#name, &outrider::name);
  OUTRIDER_FUNCTIONS(IMPLEMENT)
  library.impl("mean", &outrider::mean);
  library.impl("layer_norm", &outrider::layer_norm);
  library.impl("truncated", &outrider::truncated);
  library.impl("move_slots", &outrider::move_slots);
}
