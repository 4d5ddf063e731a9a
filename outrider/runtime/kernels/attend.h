// Attention of a few query tokens over KV buffers.
//
// Every query token has a list of the slots that it attends to, and all its sums run over that list
// in order, so hidden slots change no bit, wherever they are. Keys and values are read once for all
// query tokens and heads of a group: at the beginning of the lists, where all tokens attend to the
// same slots, a block of them is converted once for all queries (``SharedSlots``). The sums are the
// same, bit for bit. Later blocks are prefetched, since hardware prefetchers do not recognise a
// stream in rows of several slots that are read a vector at a time.

#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <vector>

#include "share.h"
#include "tensor.h"
#include "vectors.h"

namespace outrider {

constexpr int64_t kQueries = 8;  // query tokens whose scores are kept at once
constexpr int64_t kSlots = 64;   // slots whose values stay in the cache
constexpr int64_t kKeysAhead = 2 * kLanes;  // slots by which keys are prefetched ahead
constexpr int64_t kSharing = 3;  // queries from which it pays to convert a block for all
constexpr float kHidden = std::numeric_limits<float>::lowest() / 2;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Scalar products of a query with kLanes keys.
template <typename T>
inline V products(const float* query, const std::array<const T*, kLanes>& keys, int64_t C) {
  V sums[kLanes];
  for (V& each : sums) each = V(0.f);
  int64_t c = 0;
  for (; c + kLanes <= C; c += kLanes) {
    const V inputs = V::loadu(query + c);
    for (int64_t i = 0; i < kLanes; i++)
      sums[i] = at::vec::fmadd(inputs, load(keys[i] + c), sums[i]);
  }
  float lanes[kLanes * kLanes], transposed[kLanes * kLanes];
  for (int64_t i = 0; i < kLanes; i++) sums[i].store(lanes + i * kLanes);
  at::vec::transpose_mxn<float, kLanes, kLanes>(lanes, kLanes, transposed, kLanes);
  for (int64_t i = 0; i < kLanes; i++) sums[i] = V::loadu(transposed + i * kLanes);
  for (int64_t half = kLanes / 2; half; half /= 2)
    for (int64_t i = 0; i < half; i++) sums[i] = sums[i] + sums[i + half];
  if (c == C) return sums[0];
  sums[0].store(lanes);
  for (int64_t i = 0; i < kLanes; i++)
    for (int64_t rest = c; rest < C; rest++)
      lanes[i] += query[rest] * static_cast<float>(keys[i][rest]);
  return V::loadu(lanes);
}

// Adds the weighted values at some slots to R vectors of `to`.
template <int R, typename T>
inline void add(float* to, const float* weights, const T* values, int64_t stride,
                const int32_t* slots, int64_t count) {
  V sums[R];
  for (int r = 0; r < R; r++) sums[r] = V::loadu(to + r * kLanes);
  for (int64_t i = 0; i < count; i++) {
    const V weight(weights[i]);
    const T* row = values + slots[i] * stride;
    for (int r = 0; r < R; r++) sums[r] = at::vec::fmadd(weight, load(row + r * kLanes), sums[r]);
  }
  for (int r = 0; r < R; r++) sums[r].store(to + r * kLanes);
}

template <typename T>
inline void add_all(float* to, const float* weights, const T* values, int64_t stride,
                    const int32_t* slots, int64_t count, int64_t D) {
  int64_t d = 0;
  for (; d + 8 * kLanes <= D; d += 8 * kLanes)
    add<8>(to + d, weights, values + d, stride, slots, count);
  for (; d + 4 * kLanes <= D; d += 4 * kLanes)
    add<4>(to + d, weights, values + d, stride, slots, count);
  for (; d + kLanes <= D; d += kLanes)
    add<1>(to + d, weights, values + d, stride, slots, count);
  for (; d < D; d++)
    for (int64_t i = 0; i < count; i++)
      to[d] += weights[i] * static_cast<float>(values[slots[i] * stride + d]);
}

// Queries whose sums for a block of slots fit into the registers, and whether the shared keys of a
// block are transposed, so that several queries are multiplied at a time. Otherwise the sums of each
// query are.
#if defined(CPU_CAPABILITY_AVX512)
constexpr int kTogether = 4;
constexpr bool kTransposesKeys = true;
#else
constexpr int kTogether = 2;
constexpr bool kTransposesKeys = false;
#endif

// Scalar products of Q queries with kLanes transposed keys: the parts of them that lanes First,
// First + Stride, … of products() add up, in its order.
template <int Q, int First = 0, int Stride = 1>
inline __attribute__((always_inline)) std::array<V, Q> transposed_products(
    const std::array<const float*, Q>& queries, const float* transposed, int64_t C) {
  std::array<V, Q> sums;
  if constexpr (Stride == kLanes) {
    sums.fill(V(0.f));
    for (int64_t c = First; c < C; c += kLanes) {
      const V keys = V::loadu(transposed + c * kLanes);
      for (int i = 0; i < Q; i++) sums[i] = at::vec::fmadd(V(queries[i][c]), keys, sums[i]);
    }
  } else {
    sums = transposed_products<Q, First, 2 * Stride>(queries, transposed, C);
    const auto more = transposed_products<Q, First + Stride, 2 * Stride>(queries, transposed, C);
    for (int i = 0; i < Q; i++) sums[i] = sums[i] + more[i];
  }
  return sums;
}

// Adds weighted values to R vectors of each of Q results, in the order of add(); `row` gives the
// values of a slot.
template <int Q, int R, typename F>
inline void add_together(const std::array<float*, Q>& to, const std::array<const float*, Q>& weights,
                         const F& row, int64_t count) {
  V sums[Q][R];
  for (int i = 0; i < Q; i++)
    for (int r = 0; r < R; r++) sums[i][r] = V::loadu(to[i] + r * kLanes);
  for (int64_t s = 0; s < count; s++) {
    const float* from = row(s);
    V values[R];
    for (int r = 0; r < R; r++) values[r] = V::loadu(from + r * kLanes);
    for (int i = 0; i < Q; i++) {
      const V weight(weights[i][s]);
      for (int r = 0; r < R; r++) sums[i][r] = at::vec::fmadd(weight, values[r], sums[i][r]);
    }
  }
  for (int i = 0; i < Q; i++)
    for (int r = 0; r < R; r++) sums[i][r].store(to[i] + r * kLanes);
}

// The keys or values of a block of slots.
template <typename T>
struct Rows {
  const T* first;
  int64_t stride;
  const int32_t* slots;

  const T* at(int64_t i) const { return first + slots[i] * stride; }

  Rows from(int64_t i) const { return {first, stride, slots + i}; }

  // Prefetches rows `begin` to `end` of the first `count`, which are `width` numbers each.
  void prefetch(int64_t begin, int64_t end, int64_t count, int64_t width) const {
    constexpr int64_t line = 64 / sizeof(T);
    for (int64_t i = begin; i < std::min(end, count); i++)
      for (int64_t c = 0; c < width; c += line) __builtin_prefetch(at(i) + c);
  }
};

// Rows of slots that all query tokens of a block attend to, as floats; `width` is whole vectors.
template <typename T>
struct SharedSlots {
  Rows<T> rows;
  int64_t width;
  float* block;  // where they are converted

  // Converts `count` rows.
  void widen(int64_t count) const {
    if constexpr (!std::is_same_v<T, float>)
      for (int64_t i = 0; i < count; i++)
        for (int64_t c = 0; c < width; c += kLanes)
          load(rows.at(i) + c).store(block + i * width + c);
  }

  // A row, once it is converted.
  const float* row(int64_t i) const {
    if constexpr (std::is_same_v<T, float>)
      return rows.at(i);
    else
      return block + i * width;
  }

  // Converts kLanes rows and transposes them: (width, kLanes).
  void transpose() const {
    float straight[kLanes * kLanes];
    for (int64_t c = 0; c < width; c += kLanes) {
      for (int64_t i = 0; i < kLanes; i++) load(rows.at(i) + c).store(straight + i * kLanes);
      at::vec::transpose_mxn<float, kLanes, kLanes>(straight, kLanes, block + c * kLanes, kLanes);
    }
  }
};

inline V exponential(const V& x) { return x.exp(); }

// Replaces `count` scores, in whole vectors, by weights that are not normalised; returns their sum.
template <V (*kExponential)(const V&) = exponential>
inline float exponentials(float* scores, int64_t count) {
  V most(-kInfinity), total(0.f);
  for (int64_t i = 0; i < count; i += kLanes)
    most = at::vec::maximum(most, V::loadu(scores + i));
  float lanes[kLanes];
  most.store(lanes);
  const V largest(*std::max_element(lanes, lanes + kLanes));
  for (int64_t i = 0; i < count; i += kLanes) {
    const V weights = kExponential(V::loadu(scores + i) - largest);
    weights.store(scores + i);
    total = total + weights;
  }
  return sum(total);
}

// Lists the slots that a query token attends to, with their biases, in whole vectors; padding has
// no weight. Returns the number of slots.
template <typename U>
inline int64_t list_visible(const U* mask, int64_t S, int32_t* slots, float* biases) {
  int64_t count = 0, s = 0;
  auto list = [&](int64_t end) {
    for (; s < end; s++) {
      slots[count] = static_cast<int32_t>(s);
      biases[count] = static_cast<float>(mask[s]);
      count += biases[count] > kHidden;
    }
  };
  while (s + kLanes <= S) {
    float block[kLanes];
    load(mask + s).store(block);
    bool all = true;
    for (int64_t i = 0; i < kLanes; i++) all &= block[i] > kHidden;
    if (!all) {
      list(s + kLanes);
      continue;
    }
    for (int64_t i = 0; i < kLanes; i++) slots[count + i] = static_cast<int32_t>(s + i);
    std::copy_n(block, kLanes, biases + count);
    s += kLanes, count += kLanes;
  }
  list(S);
  for (int64_t i = count; i % kLanes; i++) {
    slots[i] = slots[count - 1];
    biases[i] = -kInfinity;
  }
  return count;
}

// How many slots, in whole vectors, two lists begin with in common.
inline int64_t in_common(const int32_t* one, const int32_t* other, int64_t most) {
  int64_t count = 0;
  while (count + kLanes <= most &&
         !std::memcmp(one + count, other + count, kLanes * sizeof(int32_t)))
    count += kLanes;
  return count;
}

// A thread's buffers, kept between its tasks.
struct Scratch {
  std::vector<float> queries, scores, biases, results, block;
  std::vector<int32_t> slots;
};

// Calls act with a number of the type: bfloat16 or float.
template <typename F>
inline void with_type(c10::ScalarType dtype, const F& act) {
  dtype == c10::kBFloat16 ? act(BFloat16()) : act(float());
}

// T is the type of keys and values. What reads the mask and the queries, and writes the results, is
// the little that is compiled for their types, too.
template <typename T>
struct Attention {
  const Tensor &q, &k, &v, &mask;
  float scale;
  Tensor& out;
  int64_t H = q.size(1), N = q.size(2), C = q.size(3), S = k.size(2), D = v.size(3);
  int64_t group = H / k.size(1), room = S + kLanes;

  // Up to kQueries query tokens from n on, with all the heads of a group. Query r is that of token
  // n + r / group.
  void columns(int64_t b, int64_t g, int64_t n, int64_t count, Scratch& scratch) const {
    const T* keys = k.const_data_ptr<T>() + b * k.stride(0) + g * k.stride(1);
    const T* values = v.const_data_ptr<T>() + b * v.stride(0) + g * v.stride(1);
    const int64_t num = count * group;
    scratch.slots.resize(kQueries * room);
    scratch.biases.resize(kQueries * room);
    scratch.scores.resize(kQueries * group * room);
    scratch.queries.resize(num * C);
    scratch.results.assign(num * D, 0.f);
    scratch.block.resize(std::max(kLanes * C, kSlots * D));
    const int32_t* slots = scratch.slots.data();
    const float* biases = scratch.biases.data();
    float *scores = scratch.scores.data(), *block = scratch.block.data();
    float *queries = scratch.queries.data(), *results = scratch.results.data();
    int64_t seen[kQueries], most = 0;
    with_type(mask.scalar_type(), [&](auto number) {
      const auto* row = mask.const_data_ptr<decltype(number)>() + b * mask.stride(0);
      for (int64_t i = 0; i < count; i++)
        seen[i] = list_visible(row + (n + i) * mask.stride(2), S, scratch.slots.data() + i * room,
                               scratch.biases.data() + i * room);
    });
    for (int64_t i = 0; i < count; i++) most = std::max(most, seen[i]);
    int64_t common = num >= kSharing && C % kLanes == 0 && D % kLanes == 0 ? seen[0] : 0;
    common = common / kLanes * kLanes;
    for (int64_t i = 1; i < count; i++)
      common = in_common(slots, slots + i * room, std::min(common, seen[i]));
    with_type(q.scalar_type(), [&](auto number) {
      const auto* from = q.const_data_ptr<decltype(number)>() + b * q.stride(0);
      for (int64_t r = 0; r < num; r++) {
        const int64_t head = g * group + r % group, token = n + r / group;
        std::copy_n(from + head * q.stride(1) + token * q.stride(2), C, queries + r * C);
      }
    });

    auto score = [&](int64_t r, int64_t s, const V& product) {
      const V bias = V::loadu(biases + r / group * room + s);
      at::vec::fmadd(product, V(scale), bias).store(scores + r * room + s);
    };
    // each query prefetches an equal part of a later block
    const int64_t keys_each = (kLanes + num - 1) / num, values_each = (kSlots + num - 1) / num;
    for (int64_t s = 0; s < common; s += kLanes) {
      const SharedSlots<T> here{Rows<T>{keys, k.stride(2), slots + s}, C, block};
      const Rows<T> ahead = here.rows.from(kKeysAhead);
      const int64_t more = s + kKeysAhead < common ? kLanes : 0;
      if constexpr (kTransposesKeys) {
        here.transpose();
        by_several(num, [&](auto several, int64_t r) {
          ahead.prefetch(r * keys_each, (r + several) * keys_each, more, C);
          std::array<const float*, several> rows;
          for (int i = 0; i < several; i++) rows[i] = queries + (r + i) * C;
          const auto found = transposed_products<several>(rows, block, C);
          for (int i = 0; i < several; i++) score(r + i, s, found[i]);
        });
      } else {
        here.widen(kLanes);
        std::array<const float*, kLanes> rows;
        for (int64_t i = 0; i < kLanes; i++) rows[i] = here.row(i);
        for (int64_t r = 0; r < num; r++) {
          ahead.prefetch(r * keys_each, (r + 1) * keys_each, more, C);
          score(r, s, products(queries + r * C, rows, C));
        }
      }
    }
    for (int64_t s = common; s < most; s += kLanes)
      for (int64_t r = 0; r < num; r++)
        if (s < seen[r / group]) {
          const Rows<T> here{keys, k.stride(2), slots + r / group * room + s};
          if (r % group == 0 && s + kKeysAhead < seen[r / group])
            here.from(kKeysAhead).prefetch(0, kLanes, kLanes, C);
          std::array<const T*, kLanes> rows;
          for (int64_t i = 0; i < kLanes; i++) rows[i] = here.at(i);
          score(r, s, products(queries + r * C, rows, C));
        }

    for (int64_t r = 0; r < num; r++) {
      const float total = exponentials(scores + r * room, seen[r / group]);
      for (int64_t s = 0; s < seen[r / group]; s++) scores[r * room + s] /= total;
    }

    for (int64_t s = 0; s < common; s += kSlots) {
      const int64_t left = std::min(kSlots, common - s);
      const SharedSlots<T> here{Rows<T>{values, v.stride(2), slots + s}, D, block};
      const Rows<T> ahead = here.rows.from(kSlots);
      const int64_t more = std::clamp<int64_t>(common - s - kSlots, 0, kSlots);
      here.widen(left);
      by_several(num, [&](auto several, int64_t r) {
        ahead.prefetch(r * values_each, (r + several) * values_each, more, D);
        add_block<several>(r, s, left, here, scratch);
      });
    }
    for (int64_t s = common; s < most; s += kSlots)
      for (int64_t r = 0; r < num; r++) {
        const int64_t left = std::min(kSlots, seen[r / group] - s);
        const int32_t* listed = slots + r / group * room + s;
        add_all(results + r * D, scores + r * room + s, values, v.stride(2), listed, left, D);
      }
    with_type(out.scalar_type(), [&](auto number) {
      auto* first = out.mutable_data_ptr<decltype(number)>();
      for (int64_t r = 0; r < num; r++) {
        auto* to = first + ((b * N + n + r / group) * H + g * group + r % group) * D;
        for (int64_t d = 0; d < D; d++) to[d] = static_cast<decltype(number)>(results[r * D + d]);
      }
    });
  }

  // Calls act for `num` queries, Most of them at a time, and for the rest together.
  template <int Most = kTogether, typename F>
  static void by_several(int64_t num, const F& act, int64_t r = 0) {
    for (; r + Most <= num; r += Most) act(std::integral_constant<int, Most>(), r);
    if constexpr (Most > 1)
      if (r < num) by_several<Most - 1>(num, act, r);
  }

  // Adds the values of a block of common slots, from s on, to the results of Q queries from r on.
  template <int Q>
  void add_block(int64_t r, int64_t s, int64_t count, const SharedSlots<T>& values,
                 Scratch& scratch) const {
    std::array<float*, Q> to;
    std::array<const float*, Q> weights;
    for (int i = 0; i < Q; i++) {
      to[i] = scratch.results.data() + (r + i) * D;
      weights[i] = scratch.scores.data() + (r + i) * room + s;
    }
    int64_t d = 0;
    auto add = [&](auto vectors) {
      add_together<Q, vectors>(
          to, weights, [&](int64_t i) { return values.row(i) + d; }, count);
      for (float*& each : to) each += vectors * kLanes;
      d += vectors * kLanes;
    };
    int64_t left = D / kLanes;
    for (; left >= 4; left -= 4) add(std::integral_constant<int, 4>());
    for (; left; left--) add(std::integral_constant<int, 1>());
  }

  void run() const {
    const int64_t B = q.size(0), G = k.size(1);
    const int64_t part = std::clamp<int64_t>(N > 4 ? (N + 1) / 2 : N, 1, kQueries);
    const int64_t cost = 2 * group * S * (C + D);  // exponentials and all, about twice the products
    share(B * G * N, part, cost, [&](int64_t task, int64_t end) {
      thread_local Scratch scratch;
      while (task < end) {
        const int64_t n = task % N, count = std::min({kQueries, N - n, end - task});
        columns(task / N / G, task / N % G, n, count, scratch);
        task += count;
      }
    });
  }
};

}  // namespace outrider
