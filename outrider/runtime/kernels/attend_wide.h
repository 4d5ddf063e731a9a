// Attention of many query tokens of a row over KV buffers, as two matrix products; of a few ones, too,
// where the processor has a matrix unit.
//
// Keys and values are packed as the weights of linear layers are (packed.h): the slots are the
// outputs of one layer and the inputs of the next. A block of query tokens, with all heads of a
// group, computes its scores of all slots from the first to the last that one of its tokens attends
// to; slots after them, most of which are those of later tokens, cost nothing. Sums depend on the
// blocks, so exact models do without this.

#pragma once

#include <algorithm>
#include <vector>

#include "attend.h"
#include "buffer.h"
#include "dots.h"
#include "packed.h"
#include "share.h"
#include "tensor.h"
#include "tiles.h"

namespace outrider {

// Within 20 units in the last place.
inline V quick_exponential(const V& x) { return x.exp_u20(); }

constexpr int64_t kScores = 1 << 17;  // numbers of a block that stay in the processor's cache

inline int64_t panels_of(int64_t count) { return (count + kPanel - 1) / kPanel; }

// What multiplies: floats, or pairs of bfloat16 where the processor has instructions for them. A row
// of inputs, and of a panel, consists of 32-bit words: floats or pairs.
struct FloatProducts {
  static constexpr int64_t kInputs = 1;

  template <typename T>
  static void pair(const T* from, int64_t K, float* to) {
    std::copy(from, from + K, to);
  }
  template <typename T>
  static void zip(const T* first, const T*, int64_t count, float* to) {
    std::copy(first, first + count, to);
  }
  static float rounded(float*, int64_t, float sum) { return sum; }
  static void multiply(int64_t M, const float* x, const float* panels, int64_t K, const Target& to,
                       int64_t count) {
    multiply_panels(M, x, Panels<float>{panels, K}, to, count);
  }
};

struct PairProducts {
  static constexpr int64_t kInputs = 2;

  template <typename T>
  static void pair(const T* from, int64_t K, float* to) {
    pair_up(from, K, reinterpret_cast<int32_t*>(to));
  }
  // Rounds positive numbers, in whole vectors, to bfloat16; returns the sum of what is left, so that
  // rounding many equal weights does not make the result too large or too small.
  static float rounded(float* numbers, int64_t count, float) {
    V total(0.f);
    for (int64_t i = 0; i < count; i += kLanes) {
      uint32_t bits[kLanes];
      std::memcpy(bits, numbers + i, sizeof bits);
      for (uint32_t& each : bits) each = (each + 0x7fffu + (each >> 16 & 1)) & 0xffff0000u;
      std::memcpy(numbers + i, bits, sizeof bits);
      total = total + V::loadu(numbers + i);
    }
    return sum(total);
  }
  static void zip(const BFloat16* first, const BFloat16* second, int64_t count, float* to) {
    uint32_t* words = reinterpret_cast<uint32_t*>(to);
    for (int64_t i = 0; i < count; i++)
      words[i] = static_cast<uint32_t>(first[i].x) << 16 | (second ? second[i].x : 0);
  }
  static void multiply(int64_t M, const float* x, const float* panels, int64_t K, const Target& to,
                       int64_t count) {
    const PairedInputs paired{reinterpret_cast<const int32_t*>(x), words_of(K)};
    const auto multiply = use_tiles(M, K) ? multiply_tiles<Target> : multiply_dots<Target>;
    multiply(M, paired, Panels<BFloat16>{reinterpret_cast<const BFloat16*>(panels), K}, to, count);
  }
};

// T is the type of queries, keys and values, and of the result. What reads the mask is the little
// that is compiled for its type, too.
template <typename T>
struct WideAttention {
  using Products =
      std::conditional_t<kHasDots && std::is_same_v<T, BFloat16>, PairProducts, FloatProducts>;
  static constexpr int64_t kInputs = Products::kInputs;

  const Tensor &q, &k, &v, &mask;
  float scale;
  Tensor& out;
  int64_t H = q.size(1), N = q.size(2), C = q.size(3), S = k.size(2), D = v.size(3);
  int64_t G = k.size(1), group = H / G;
  int64_t slots = panels_of(S) * kPanel;  // in whole panels
  int64_t key_words = (C + kInputs - 1) / kInputs, key_size = key_words * slots;
  int64_t value_size = panels_of(D) * kPanel * slots / kInputs;

  // Packs the keys and values of a group of heads at the slots from begin, where a panel begins, to
  // end; zeros fill up the last panel. Slots after them are not read.
  void pack(int64_t b, int64_t g, int64_t begin, int64_t end, float* keys, float* values) const {
    const T* key = k.const_data_ptr<T>() + b * k.stride(0) + g * k.stride(1);
    const T* value = v.const_data_ptr<T>() + b * v.stride(0) + g * v.stride(1);
    const int64_t last = panels_of(end) * kPanel;
    if (end < last) std::fill(keys + (last - kPanel) * key_words, keys + last * key_words, 0.f);
    for (int64_t s = begin; s < end; s += kLanes)
      pack_keys(key + s * k.stride(2), std::min(kLanes, end - s),
                keys + s / kPanel * kPanel * key_words + s % kPanel);
    for (int64_t d = 0; d < panels_of(D) * kPanel; d += kPanel) {
      float* to = values + (d * slots + begin * kPanel) / kInputs;
      if (end < last || D % kPanel) std::fill_n(to, (last - begin) * kPanel / kInputs, 0.f);
      for (int64_t s = begin; s < end; s += kInputs, to += kPanel) {
        const T* first = value + s * v.stride(2) + d;
        const T* second = s + 1 < end ? first + v.stride(2) : nullptr;
        Products::zip(first, second, std::min(kPanel, D - d), to);
      }
    }
  }

  // Packs the keys of up to kLanes slots: word i of a slot becomes a number of row i.
  void pack_keys(const T* from, int64_t count, float* to) const {
    thread_local std::vector<float> rows;
    rows.resize(kLanes * key_words);
    for (int64_t s = 0; s < count; s++)
      Products::pair(from + s * k.stride(2), C, rows.data() + s * key_words);
    int64_t i = 0;
    if (count == kLanes)
      for (; i + kLanes <= key_words; i += kLanes)
        at::vec::transpose_mxn<float, kLanes, kLanes>(rows.data() + i, key_words, to + i * kPanel,
                                                      kPanel);
    for (; i < key_words; i++)
      for (int64_t s = 0; s < count; s++)
        std::memcpy(to + i * kPanel + s, &rows[s * key_words + i], sizeof(float));
  }

  // The slots that some of these query tokens attend to, from the beginning of a panel.
  std::pair<int64_t, int64_t> visible(int64_t b, int64_t n, int64_t count) const {
    std::pair<int64_t, int64_t> found;
    with_type(mask.scalar_type(), [&](auto number) {
      found = visible(biases_of<decltype(number)>(b, n), count);
    });
    return found;
  }

  template <typename U>
  std::pair<int64_t, int64_t> visible(const U* biases, int64_t count) const {
    int64_t begin = S, end = 0;
    for (int64_t i = 0; i < count; i++, biases += mask.stride(2)) {
      int64_t last = S, first = 0;
      while (last > end && static_cast<float>(biases[last - 1]) <= kHidden) last--;
      while (first < begin && static_cast<float>(biases[first]) <= kHidden) first++;
      begin = std::min(begin, first), end = std::max(end, last);
    }
    if (begin >= end) return {0, S};
    return {begin / kPanel * kPanel, end};
  }

  // Scales scores and adds biases.
  template <typename U>
  void add_biases(float* scores, const U* biases, int64_t count) const {
    int64_t s = 0;
    for (; s + kLanes <= count; s += kLanes)
      at::vec::fmadd(V::loadu(scores + s), V(scale), load(biases + s)).store(scores + s);
    for (; s < count; s++) scores[s] = scores[s] * scale + static_cast<float>(biases[s]);
  }

  // Turns `count` scores, the first of which query token n has for the slots from begin to end, into
  // weights that are not normalised; returns their sum.
  float weights(float* scores, int64_t b, int64_t n, int64_t begin, int64_t end,
                int64_t count) const {
    with_type(mask.scalar_type(), [&](auto number) {
      add_biases(scores, biases_of<decltype(number)>(b, n) + begin, end - begin);
    });
    std::fill(scores + (end - begin), scores + count, -kInfinity);
    return Products::rounded(scores, count, exponentials<quick_exponential>(scores, count));
  }

  template <typename U>
  const U* biases_of(int64_t b, int64_t n) const {
    return mask.const_data_ptr<U>() + b * mask.stride(0) + n * mask.stride(2);
  }

  // Query tokens n to n + count with all the heads of a group.
  void block(int64_t b, int64_t g, int64_t n, int64_t count, int64_t begin, int64_t end,
             const float* keys, const float* values) const {
    thread_local std::vector<float> inputs, scores, results, totals;
    const int64_t M = count * group;
    const int64_t width = panels_of(end - begin) * kPanel, weight_words = width / kInputs;
    inputs.resize(M * std::max(key_words, weight_words));
    scores.resize(M * width), results.resize(M * D), totals.resize(M);
    for (int64_t m = 0; m < M; m++) {
      const int64_t h = g * group + m % group, token = n + m / group;
      const T* query = q.const_data_ptr<T>() + b * q.stride(0) + h * q.stride(1);
      Products::pair(query + token * q.stride(2), C, inputs.data() + m * key_words);
    }
    Products::multiply(M, inputs.data(), keys + begin * key_words, C,
                       {scores.data(), width, nullptr, width}, width / kPanel);
    for (int64_t m = 0; m < M; m++) {
      float* row = scores.data() + m * width;
      totals[m] = weights(row, b, n + m / group, begin, end, width);
      Products::pair(row, width, inputs.data() + m * weight_words);
    }
    for (int64_t d = 0; d < D; d += kPanel)
      Products::multiply(M, inputs.data(), values + (d * slots + begin * kPanel) / kInputs, width,
                         {results.data() + d, D, nullptr, D - d}, 1);
    for (int64_t m = 0; m < M; m++) {
      T* to = out.mutable_data_ptr<T>() + ((b * N + n + m / group) * H + g * group + m % group) * D;
      const float factor = 1 / totals[m];
      for (int64_t d = 0; d < D; d++) to[d] = static_cast<T>(results[m * D + d] * factor);
    }
  }

  void run() const {
    const int64_t B = q.size(0), size = key_size + value_size;
    const int64_t tokens = std::clamp<int64_t>(kScores / slots / group, 1, std::min<int64_t>(N, 64));
    const int64_t blocks = (N + tokens - 1) / tokens;
    if (blocks == 1) return run_rows(B, size);
    const Buffer<float> packed(B * G * size);
    float* base = packed.data();
    share(B * G, 1, size, [&](int64_t i, int64_t last) {
      for (; i < last; i++) {
        const int64_t end = visible(i / G, 0, N).second;
        pack(i / G, i % G, 0, end, base + i * size, base + i * size + key_size);
      }
    });
    share(B * G * blocks, 1, tokens * group * S * (C + D) / 2, [&](int64_t task, int64_t last) {
      for (; task < last; task++) {
        const int64_t i = task / blocks, n = task % blocks * tokens, count = std::min(tokens, N - n);
        const auto [begin, end] = visible(i / G, n, count);
        block(i / G, i % G, n, count, begin, end, base + i * size, base + i * size + key_size);
      }
    });
  }

  // As run(), for query tokens that fit into one block: the slots that they attend to are packed, and
  // are then in the processor's cache.
  void run_rows(int64_t B, int64_t size) const {
    share(B * G, 1, (N * group + kPanel) * S * (C + D) / 2, [&](int64_t i, int64_t last) {
      thread_local std::vector<float> packed;
      packed.resize(size);
      float *keys = packed.data(), *values = keys + key_size;
      for (; i < last; i++) {
        const auto [begin, end] = visible(i / G, 0, N);
        pack(i / G, i % G, begin, end, keys, values);
        block(i / G, i % G, 0, N, begin, end, keys, values);
      }
    });
  }
};

}  // namespace outrider
