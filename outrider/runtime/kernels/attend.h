// Attention of a few query tokens over KV buffers.
//
// Every query token has a list of the slots that it attends to, and all its sums run over that list
// in order, so hidden slots change no bit, wherever they are. Keys and values are read once for all
// query tokens and heads of a group.

#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "share.h"
#include "vectors.h"

namespace outrider {

constexpr int64_t kQueries = 8;  // query tokens whose scores are kept at once
constexpr int64_t kSlots = 64;   // slots whose values stay in the cache
constexpr float kHidden = std::numeric_limits<float>::lowest() / 2;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Scalar products of a query with the keys at kLanes slots.
template <typename T>
inline V products(const float* query, const T* keys, int64_t stride, const int32_t* slots,
                  int64_t C) {
  const T* rows[kLanes];
  V sums[kLanes];
  for (int64_t i = 0; i < kLanes; i++) {
    rows[i] = keys + slots[i] * stride;
    sums[i] = V(0.f);
  }
  int64_t c = 0;
  for (; c + kLanes <= C; c += kLanes) {
    const V inputs = V::loadu(query + c);
    for (int64_t i = 0; i < kLanes; i++)
      sums[i] = at::vec::fmadd(inputs, load(rows[i] + c), sums[i]);
  }
  float lanes[kLanes * kLanes], turned[kLanes * kLanes];
  for (int64_t i = 0; i < kLanes; i++) sums[i].store(lanes + i * kLanes);
  at::vec::transpose_mxn<float, kLanes, kLanes>(lanes, kLanes, turned, kLanes);
  for (int64_t i = 0; i < kLanes; i++) sums[i] = V::loadu(turned + i * kLanes);
  for (int64_t half = kLanes / 2; half; half /= 2)
    for (int64_t i = 0; i < half; i++) sums[i] = sums[i] + sums[i + half];
  if (c == C) return sums[0];
  sums[0].store(lanes);
  for (int64_t i = 0; i < kLanes; i++)
    for (int64_t rest = c; rest < C; rest++)
      lanes[i] += query[rest] * static_cast<float>(rows[i][rest]);
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

// Replaces `count` scores, in whole vectors, by weights that are not normalised; returns their sum.
inline float exponentials(float* scores, int64_t count) {
  V most(-kInfinity), total(0.f);
  for (int64_t i = 0; i < count; i += kLanes)
    most = at::vec::maximum(most, V::loadu(scores + i));
  float lanes[kLanes];
  most.store(lanes);
  const V largest(*std::max_element(lanes, lanes + kLanes));
  for (int64_t i = 0; i < count; i += kLanes) {
    const V weights = (V::loadu(scores + i) - largest).exp();
    weights.store(scores + i);
    total = total + weights;
  }
  return sum(total);
}

// Lists the slots that a query token attends to, with their biases, in whole vectors; padding has
// no weight. Returns the number of slots.
inline int64_t list_visible(const float* mask, int64_t S, int32_t* slots, float* biases) {
  int64_t count = 0;
  for (int64_t s = 0; s < S; s++) {
    slots[count] = static_cast<int32_t>(s);
    biases[count] = mask[s];
    count += mask[s] > kHidden;
  }
  for (int64_t i = count; i % kLanes; i++) {
    slots[i] = slots[count - 1];
    biases[i] = -kInfinity;
  }
  return count;
}

// A thread's buffers, kept between its tasks.
struct Scratch {
  std::vector<float> scores, biases;
  std::vector<int32_t> slots;
};

template <typename T>
struct Attention {
  const at::Tensor &q, &k, &v, &mask;
  float scale;
  at::Tensor& out;
  int64_t H = q.size(1), N = q.size(2), C = q.size(3), S = k.size(2), D = v.size(3);
  int64_t group = H / k.size(1), room = S + kLanes;

  // Up to kQueries query tokens from n on, with all the heads of a group.
  void columns(int64_t b, int64_t g, int64_t n, int64_t count, Scratch& scratch) const {
    const float* from = q.const_data_ptr<float>() + b * q.stride(0) + n * q.stride(2);
    const float* row = mask.const_data_ptr<float>() + b * mask.stride(0) + n * mask.stride(2);
    const T* keys = k.const_data_ptr<T>() + b * k.stride(0) + g * k.stride(1);
    const T* values = v.const_data_ptr<T>() + b * v.stride(0) + g * v.stride(1);
    float* to = out.mutable_data_ptr<float>() + (b * N + n) * H * D;
    scratch.slots.resize(kQueries * room);
    scratch.biases.resize(kQueries * room);
    scratch.scores.resize(kQueries * group * room);
    const int32_t* slots = scratch.slots.data();
    const float* biases = scratch.biases.data();
    float* scores = scratch.scores.data();
    int64_t seen[kQueries], most = 0;
    for (int64_t i = 0; i < count; i++) {
      seen[i] = list_visible(row + i * mask.stride(2), S, scratch.slots.data() + i * room,
                             scratch.biases.data() + i * room);
      most = std::max(most, seen[i]);
    }
    auto each = [&](auto&& act) {
      for (int64_t i = 0; i < count; i++)
        for (int64_t j = 0; j < group; j++)
          act(i, g * group + j, scores + (i * group + j) * room, to + (i * H + g * group + j) * D);
    };
    for (int64_t s = 0; s < most; s += kLanes)
      each([&](int64_t i, int64_t h, float* score, float*) {
        if (s >= seen[i]) return;
        const float* query = from + h * q.stride(1) + i * q.stride(2);
        const V result = products(query, keys, k.stride(2), slots + i * room + s, C);
        at::vec::fmadd(result, V(scale), V::loadu(biases + i * room + s)).store(score + s);
      });
    each([&](int64_t i, int64_t, float* score, float* result) {
      const float total = exponentials(score, seen[i]);
      for (int64_t s = 0; s < seen[i]; s++) score[s] /= total;
      std::fill(result, result + D, 0.f);
    });
    for (int64_t s = 0; s < most; s += kSlots)
      each([&](int64_t i, int64_t, float* score, float* result) {
        const int64_t left = std::min(kSlots, seen[i] - s);
        add_all(result, score + s, values, v.stride(2), slots + i * room + s, left, D);
      });
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
