#include "packing.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>

#include <vector>

namespace outrider {

static const int64_t kOutputs = panel_outputs();

at::Tensor pack(const at::Tensor& weight, bool keep_dtype) {
  const int64_t N = weight.size(0), K = weight.size(1), panels = (N + kOutputs - 1) / kOutputs;
  const at::Tensor narrow = weight.to(at::kBFloat16);
  const bool lossless = !keep_dtype && narrow.to(weight.scalar_type()).equal(weight);
  const at::Tensor kept = lossless ? narrow : weight;
  const bool pairs = kept.scalar_type() == at::kBFloat16;
  const int64_t rows = pairs ? K + K % 2 : K, count = pairs ? 2 : 1;
  const at::Tensor padded =
      at::constant_pad_nd(kept, {0, rows - K, 0, panels * kOutputs - N});
  const at::Tensor split = padded.view({panels, kOutputs, rows / count, count}).flip({3});
  return split.permute({0, 2, 1, 3}).reshape({panels, rows, kOutputs}).contiguous();
}

at::Tensor pack_int8(const at::Tensor& weight, const at::Tensor& scale) {
  const int64_t N = weight.size(0), K = weight.size(1), panels = (N + kOutputs - 1) / kOutputs;
  const int64_t more = panels * kOutputs - N;
  const at::Tensor padded = at::constant_pad_nd(weight, {0, 0, 0, more});
  const at::Tensor values = padded.view({panels, kOutputs, K}).transpose(1, 2);
  const at::Tensor scales = at::constant_pad_nd(scale.to(at::kFloat), {0, more}).view(at::kChar);
  return at::cat({values, scales.view({panels, -1, kOutputs})}, 1);
}

// Pads the outputs, the first dimension, with zeros to whole panels.
static at::Tensor pad_outputs(const at::Tensor& x) {
  std::vector<int64_t> more(2 * x.dim(), 0);
  more.back() = (x.size(0) + kOutputs - 1) / kOutputs * kOutputs - x.size(0);
  return at::constant_pad_nd(x, more);
}

// The sizes of integers (N, K) whose groups have the scales (N, groups).
struct Groups {
  int64_t panels, groups, group;

  Groups(const at::Tensor& values, const at::Tensor& scale, int64_t bits)
      : panels((values.size(0) + kOutputs - 1) / kOutputs),
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
        pad_outputs(numbers->to(at::kHalf)).view({size.panels, kOutputs, size.groups});
    rows.push_back(split.transpose(1, 2).contiguous().view(at::kChar).view(
        {size.panels, size.groups, -1, kOutputs}));
  }
  return rows;
}

at::Tensor pack_groups(const at::Tensor& values, const at::Tensor& scale,
                              const std::optional<at::Tensor>& offset, int64_t bits) {
  const Groups size(values, scale, bits);
  std::vector<at::Tensor> parts = pack_numbers(size, scale, offset);
  if (bits == 8) {
    const at::Tensor split = pad_outputs(values).view({size.panels, kOutputs, size.groups, -1});
    parts.push_back(split.permute({0, 2, 3, 1}));
  } else {
    const at::Tensor nibbles = (offset ? values : values.add(8)).to(at::kInt);
    const at::Tensor eights =
        pad_outputs(nibbles).view({size.panels, kOutputs, size.groups, -1, kStep});
    at::Tensor words = eights.select(-1, 0);
    for (int64_t i = 1; i < kStep; i++)
      words = words.bitwise_or(eights.select(-1, i).__lshift__(4 * i));
    const at::Tensor ordered = words.permute({0, 2, 3, 1}).contiguous();
    parts.push_back(ordered.view(at::kChar).view({size.panels, size.groups, -1, kOutputs}));
  }
  return at::cat(parts, 2);
}

at::Tensor pack_integer_dots(const at::Tensor& values, const at::Tensor& scale,
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
      shifted.view({size.panels, kOutputs, size.groups, -1, count, 4}).to(at::kByte);
  at::Tensor bytes = fours.select(-2, 0);
  if (bits == 4) bytes = bytes.bitwise_or(fours.select(-2, 1).__lshift__(4));
  const at::Tensor ordered = bytes.permute({0, 2, 3, 1, 4}).contiguous();
  parts.push_back(ordered.view(at::kChar).view({size.panels, size.groups, -1, kOutputs}));
  return at::cat(parts, 2).unsqueeze(-1);
}

}  // namespace outrider
