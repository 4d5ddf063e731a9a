// Linear layers and attention for passes over few tokens, on a CPU.
//
// Every number is summed in an order that depends on nothing but the model: a token's result has
// the same bits whether it is computed alone, inside a draft, a tree or a batch, and however long
// the slabs are. Weights are read once for up to kTile tokens.
//
// Legend: M tokens, K inputs, N outputs; B rows, H query heads, G key heads, S slots, C width.

#include <ATen/core/Tensor.h>
#include <ATen/Parallel.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

#include "kernels.h"

namespace outrider {
namespace {

using at::BFloat16;
using V = at::vec::Vectorized<float>;
constexpr int64_t kLanes = V::size();
constexpr int64_t kTile = 6;    // tokens whose sums fit the registers, two weights at a time
constexpr int64_t kChunk = 16;  // outputs per unit of work
constexpr int64_t kGrain = 1 << 15;  // multiplications that are worth another thread

inline V load(const float* from) { return V::loadu(from); }

inline V load(const BFloat16* from) {
  V to;
  at::vec::load_fp32_from_bf16(from, to);
  return to;
}

inline float sum(const V& v) {
  float lanes[kLanes];
  v.store(lanes);
  for (int64_t half = kLanes / 2; half; half /= 2)
    for (int64_t i = 0; i < half; i++) lanes[i] += lanes[i + half];
  return lanes[0];
}

// y[m, r] = x[m, :] · w[r, :], for M tokens and R outputs.
template <int M, int R, typename W>
inline void tile(const float* x, const W* w, const float* bias, float* y, int64_t K, int64_t N) {
  V sums[M][R];
  for (int m = 0; m < M; m++)
    for (int r = 0; r < R; r++) sums[m][r] = V(0.f);
  int64_t k = 0;
  for (; k + kLanes <= K; k += kLanes) {
    V weights[R];
    for (int r = 0; r < R; r++) weights[r] = load(w + r * K + k);
    for (int m = 0; m < M; m++) {
      const V inputs = load(x + m * K + k);
      for (int r = 0; r < R; r++) sums[m][r] = at::vec::fmadd(inputs, weights[r], sums[m][r]);
    }
  }
  for (int m = 0; m < M; m++)
    for (int r = 0; r < R; r++) {
      float total = sum(sums[m][r]);
      for (int64_t i = k; i < K; i++) total += x[m * K + i] * static_cast<float>(w[r * K + i]);
      y[m * N + r] = bias ? total + bias[r] : total;
    }
}

template <int M, int R, typename W>
void outputs(const float* x, const W* w, const float* bias, float* y, int64_t K, int64_t N,
             int64_t first, int64_t last) {
  auto at_bias = [&](int64_t n) { return bias ? bias + n : nullptr; };
  int64_t n = first;
  for (; n + R <= last; n += R) tile<M, R>(x, w + n * K, at_bias(n), y + n, K, N);
  for (; n < last; n++) tile<M, 1>(x, w + n * K, at_bias(n), y + n, K, N);
}

template <typename W>
void chunk_of(const float* x, const W* w, const float* bias, float* y, int64_t M, int64_t K,
              int64_t N, int64_t first, int64_t last) {
  for (int64_t m = 0; m < M; m += kTile) {
    const float* from = x + m * K;
    float* to = y + m * N;
    switch (std::min(kTile, M - m)) {
      case 1: outputs<1, 4>(from, w, bias, to, K, N, first, last); break;
      case 2: outputs<2, 4>(from, w, bias, to, K, N, first, last); break;
      case 3: outputs<3, 4>(from, w, bias, to, K, N, first, last); break;
      case 4: outputs<4, 2>(from, w, bias, to, K, N, first, last); break;
      case 5: outputs<5, 2>(from, w, bias, to, K, N, first, last); break;
      default: outputs<6, 2>(from, w, bias, to, K, N, first, last);
    }
  }
}

struct Part {
  at::Tensor weight, bias;
  int64_t chunks;
  float* result;
};

// Several layers with the same input, side by side in rows of `N` outputs.
void multiply(const at::Tensor& x, std::vector<Part>& parts, int64_t M, int64_t K, int64_t N) {
  const float* from = x.const_data_ptr<float>();
  int64_t chunks = 0;
  for (Part& part : parts) chunks += part.chunks;
  const int64_t grain = std::max<int64_t>(1, kGrain / (kChunk * K * M));
  at::parallel_for(0, chunks, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      int64_t chunk = i;
      size_t p = 0;
      while (chunk >= parts[p].chunks) chunk -= parts[p++].chunks;
      const Part& part = parts[p];
      const float* bias = part.bias.defined() ? part.bias.const_data_ptr<float>() : nullptr;
      const int64_t first = chunk * kChunk, last = std::min(part.weight.size(0), first + kChunk);
      if (part.weight.scalar_type() == at::kBFloat16)
        chunk_of(from, part.weight.const_data_ptr<BFloat16>(), bias, part.result, M, K, N, first,
                 last);
      else
        chunk_of(from, part.weight.const_data_ptr<float>(), bias, part.result, M, K, N, first,
                 last);
    }
  });
}

}  // namespace

at::Tensor linears(const at::Tensor& x, at::TensorList weights, at::TensorList biases,
                   at::IntArrayRef outputs, int64_t widest) {
  const int64_t K = x.size(-1), M = x.numel() / K;
  if (M > widest) {
    std::vector<at::Tensor> results;
    for (size_t i = 0; i < weights.size(); i++)
      results.push_back(at::linear(x, weights[i].to(x.scalar_type()),
                                   biases.empty() ? std::nullopt : std::optional(biases[i])));
    return results.size() == 1 ? results[0] : at::cat(results, -1);
  }
  auto sizes = x.sizes().vec();
  sizes.back() = std::accumulate(outputs.begin(), outputs.end(), int64_t{0});
  at::Tensor out = at::empty(sizes, x.options().dtype(at::kFloat));
  float* to = out.mutable_data_ptr<float>();
  std::vector<Part> parts;
  for (size_t i = 0; i < weights.size(); i++) {
    const at::Tensor bias = biases.empty() ? at::Tensor() : biases[i].to(at::kFloat).contiguous();
    parts.push_back({weights[i].contiguous(), bias, (outputs[i] + kChunk - 1) / kChunk, to});
    to += outputs[i];
  }
  multiply(x.to(at::kFloat).contiguous(), parts, M, K, sizes.back());
  return out.to(x.scalar_type());
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight,
                  const std::optional<at::Tensor>& bias, int64_t outputs, int64_t widest) {
  return linears(x, weight, bias ? at::TensorList(*bias) : at::TensorList(), outputs, widest);
}

namespace {

template <typename T>
inline float dot(const float* a, const T* b, int64_t C) {
  V total(0.f);
  int64_t c = 0;
  for (; c + kLanes <= C; c += kLanes) total = at::vec::fmadd(V::loadu(a + c), load(b + c), total);
  float result = sum(total);
  for (; c < C; c++) result += a[c] * static_cast<float>(b[c]);
  return result;
}

template <typename T>
inline void add(float* to, float factor, const T* from, int64_t C) {
  int64_t c = 0;
  for (; c + kLanes <= C; c += kLanes)
    at::vec::fmadd(V(factor), load(from + c), V::loadu(to + c)).store(to + c);
  for (; c < C; c++) to[c] += factor * static_cast<float>(from[c]);
}

// Weights of the visible slots, not normalised, in place of their scores; returns their sum.
inline float exponentials(std::vector<float>& scores, int64_t count) {
  float largest = -std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < count; i++) largest = std::max(largest, scores[i]);
  for (int64_t i = count; i % kLanes; i++) scores[i] = -std::numeric_limits<float>::infinity();
  V total(0.f);
  for (int64_t i = 0; i < count; i += kLanes) {
    const V weights = (V::loadu(&scores[i]) - V(largest)).exp();
    weights.store(&scores[i]);
    total = total + weights;
  }
  return sum(total);
}

// softmax(scale q kᵀ + mask) v, where slots behind a mask at its least number do not count.
template <typename T>
void attend_as(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
               const at::Tensor& mask, double scale, at::Tensor& out) {
  const int64_t B = q.size(0), H = q.size(1), N = q.size(2), C = q.size(3);
  const int64_t S = k.size(2), D = v.size(3), group = H / k.size(1);
  const float* from = q.const_data_ptr<float>();
  const float* hidden = mask.const_data_ptr<float>();
  const T* keys = k.const_data_ptr<T>();
  const T* values = v.const_data_ptr<T>();
  float* to = out.mutable_data_ptr<float>();
  const float never = std::numeric_limits<float>::lowest() / 2;
  const int64_t grain = std::max<int64_t>(1, kGrain / (S * (C + D)));
  at::parallel_for(0, B * N * H, grain, [&](int64_t begin, int64_t end) {
    std::vector<float> scores(S + kLanes);
    std::vector<int64_t> slots(S);
    for (int64_t task = begin; task < end; task++) {
      const int64_t b = task / (N * H), n = task / H % N, h = task % H, g = h / group;
      const float* row = hidden + b * mask.stride(0) + n * mask.stride(2);
      const float* query = from + b * q.stride(0) + h * q.stride(1) + n * q.stride(2);
      const T* key = keys + b * k.stride(0) + g * k.stride(1);
      const T* value = values + b * v.stride(0) + g * v.stride(1);
      float* result = to + task * D;
      int64_t count = 0;
      for (int64_t s = 0; s < S; s++) {
        const float bias = row[s * mask.stride(3)];
        if (!(bias > never)) continue;
        slots[count] = s;
        scores[count++] = dot(query, key + s * k.stride(2), C) * static_cast<float>(scale) + bias;
      }
      std::fill(result, result + D, 0.f);
      if (count == 0) continue;
      const float total = exponentials(scores, count);
      for (int64_t i = 0; i < count; i++) add(result, scores[i], value + slots[i] * v.stride(2), D);
      for (int64_t d = 0; d < D; d++) result[d] /= total;
    }
  });
}

}  // namespace

at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                  const at::Tensor& mask, double scale) {
  const at::Tensor query = q.to(at::kFloat).contiguous();
  const at::Tensor bias = mask.to(at::kFloat).expand({q.size(0), 1, q.size(2), k.size(2)});
  const at::Tensor key = k.stride(3) == 1 ? k : k.contiguous();
  const at::Tensor value = v.stride(3) == 1 ? v : v.contiguous();
  at::Tensor out = at::empty({q.size(0), q.size(2), q.size(1), v.size(3)},
                             q.options().dtype(at::kFloat));
  if (k.scalar_type() == at::kBFloat16)
    attend_as<BFloat16>(query, key, value, bias, scale, out);
  else
    attend_as<float>(query, key, value, bias, scale, out);
  return out.to(q.scalar_type());
}

}  // namespace outrider

TORCH_LIBRARY(outrider, library) {
  library.def(
      "linear(Tensor x, Tensor weight, Tensor? bias, int outputs, int widest) -> Tensor");
  library.def(
      "linears(Tensor x, Tensor[] weights, Tensor[] biases, int[] outputs, int widest) -> Tensor");
  library.def("attend(Tensor q, Tensor k, Tensor v, Tensor mask, float scale) -> Tensor");
}

TORCH_LIBRARY_IMPL(outrider, CPU, library) {
  library.impl("linear", &outrider::linear);
  library.impl("linears", &outrider::linears);
  library.impl("attend", &outrider::attend);
}
