// torch's portable vectors of float32, and loads of bfloat16 into them.

#pragma once

#include <ATen/cpu/vec/vec.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace outrider {

using at::BFloat16;
using V = at::vec::Vectorized<float>;
constexpr int64_t kLanes = V::size();
constexpr int64_t kPanel = 2 * kLanes;  // outputs of a layer that are computed at once
constexpr int64_t kTile = 6;  // tokens whose sums for a panel fit into 16 registers

inline V load(const float* from) { return V::loadu(from); }

inline V load(const BFloat16* from) {
  V to;
  at::vec::load_fp32_from_bf16(from, to);
  return to;
}

// Adds the lanes by halves, so that the order is the same on every processor with as many lanes.
inline float sum(const V& v) {
  float lanes[kLanes];
  v.store(lanes);
  for (int64_t half = kLanes / 2; half; half /= 2)
    for (int64_t i = 0; i < half; i++) lanes[i] += lanes[i + half];
  return lanes[0];
}

// Calls act with the number of tokens, from 1 to Most, as a constant.
template <int Most, int M = 1, typename F>
inline void with_tokens(int64_t count, const F& act) {
  if constexpr (M < Most)
    if (count > M) return with_tokens<Most, M + 1>(count, act);
  act(std::integral_constant<int, M>());
}

}  // namespace outrider
