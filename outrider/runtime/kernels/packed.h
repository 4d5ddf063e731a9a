// A linear layer over packed weights: panels of kPanel outputs, each (K, kPanel).
//
// For every input the weights of a panel are multiplied by that input of up to kTokens tokens, so
// that sums stay in registers, need no addition across lanes, and run over the inputs in order
// whatever the number of tokens.
//
//     float32   the weights themselves
//     bfloat16  a 32-bit word per output and pair of inputs, the first input in its upper half: as
//               instructions for pairs read them (dots.h), and a shift or a mask makes floats; an
//               odd number of inputs is filled up with a zero
//     int8      four more rows, which hold the panel's scales as float32
//
// Weights with a scale per group of inputs are in grouped.h.

#pragma once

#include <algorithm>
#include <type_traits>

#include "vectors.h"

namespace outrider {

// Bytes that are prefetched, in all panels that are computed together. The fewer these are, the faster
// each of them is read, and the more of its bytes have to be on their way.
constexpr int64_t kAhead = 4096;

struct Pair {
  V low, high;
};

inline Pair load_pair(const float* from) { return {V::loadu(from), V::loadu(from + kLanes)}; }

inline V load_bytes(const int8_t* from) {
#if defined(CPU_CAPABILITY_AVX512)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
#elif defined(CPU_CAPABILITY_AVX2)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
#else
  float floats[kLanes];
  std::copy(from, from + kLanes, floats);
  return V::loadu(floats);
#endif
}

inline Pair load_pair(const int8_t* from) { return {load_bytes(from), load_bytes(from + kLanes)}; }

// The weights of the inputs that are loaded at once.
template <typename W>
struct Inputs {
  static constexpr int kCount = 1;
  const W* from;

  explicit Inputs(const W* weights) : from(weights) {}
  Pair at(int) const { return load_pair(from); }
};

template <>
struct Inputs<BFloat16> {
  static constexpr int kCount = 2;
  typedef uint32_t Words __attribute__((vector_size(kLanes * sizeof(uint32_t))));
  Words low, high;

  explicit Inputs(const BFloat16* weights) {
    std::memcpy(&low, weights, sizeof low);
    std::memcpy(&high, weights + kPanel, sizeof high);
  }
  static V floats(const Words& words, int input) {
    const Words bits = input ? words << 16 : words & 0xffff0000u;
    return V::loadu(&bits);
  }
  Pair at(int input) const { return {floats(low, input), floats(high, input)}; }
};

// Rows of a panel: one per input, those that fill up the last pair, and those of the scales.
template <typename W>
constexpr int64_t rows_of(int64_t K) {
  return std::is_same_v<W, int8_t>     ? K + static_cast<int64_t>(sizeof(float))
         : std::is_same_v<W, BFloat16> ? K + K % 2
                                       : K;
}

// Consecutive panels of a layer with K inputs.
template <typename W>
struct Panels {
  const W* weights;
  int64_t K;

  Panels operator+(int64_t count) const { return {weights + count * rows_of<W>(K) * kPanel, K}; }
};

// Where a panel's sums are stored, and the bias that is added first; the last panel has fewer
// outputs.
template <typename Y>
struct TargetOf {
  Y* y;
  int64_t stride;
  const float* bias;
  int64_t outputs;

  TargetOf at(int64_t token, int64_t output) const {
    return {y + token * stride + output, stride, bias ? bias + output : nullptr, outputs - output};
  }
};

using Target = TargetOf<float>;

inline void store(const V& sums, float* to, const float* bias, int64_t count) {
  if (count >= kLanes) {
    (bias ? sums + V::loadu(bias) : sums).store(to);
  } else if (count > 0) {
    (bias ? sums + V::loadu(bias, count) : sums).store(to, count);
  }
}

// Stores the sums of token m for the kLanes outputs from `first` on.
inline void store_half(const V& sums, const Target& to, int m, int64_t first) {
  store(sums, to.y + m * to.stride + first, to.bias ? to.bias + first : nullptr,
        to.outputs - first);
}

// sum += x w, for weights w that are stored as W.
//
// With AVX2's 16 registers GCC spills sums of six tokens if it may choose which operand the
// instruction overwrites, unless the instruction reads w from memory, as it does where w is stored as
// floats.
template <typename W>
inline __attribute__((always_inline)) void add_product(V& sum, const V& x, const V& w) {
#if defined(CPU_CAPABILITY_AVX2)
  if constexpr (!std::is_same_v<W, float>) {
    __m256 total = sum;
    asm("vfmadd231ps %2, %1, %0"
        : "+x"(total)
        : "x"(static_cast<__m256>(x)), "x"(static_cast<__m256>(w)));
    sum = total;
    return;
  }
#endif
  sum = at::vec::fmadd(x, w, sum);
}

// y = x wᵀ + bias for M tokens and P panels.
template <int M, int P, typename W>
inline void tile(const float* x, const Panels<W>& panels, const Target& to) {
  constexpr int kCount = Inputs<W>::kCount;
  const W* w = panels.weights;
  const int64_t K = panels.K;
  V sums[P][M][2];
  for (int p = 0; p < P; p++)
    for (int m = 0; m < M; m++) sums[p][m][0] = sums[p][m][1] = V(0.f);
  auto add = [&](int64_t k, int count) __attribute__((always_inline)) {
    for (int p = 0; p < P; p++) {
      const W* from = w + (p * rows_of<W>(K) + k) * kPanel;
      for (int64_t i = 0; i < kCount; i++)
        __builtin_prefetch(reinterpret_cast<const char*>(from + i * kPanel) + kAhead / P);
      const Inputs<W> inputs(from);
      for (int i = 0; i < count; i++) {
        const Pair weights = inputs.at(i);
        for (int m = 0; m < M; m++) {
          const V input(x[m * K + k + i]);
          add_product<W>(sums[p][m][0], input, weights.low);
          add_product<W>(sums[p][m][1], input, weights.high);
        }
      }
    }
  };
  int64_t k = 0;
  for (; k + kCount <= K; k += kCount) add(k, kCount);
  if (k < K) add(k, 1);
  for (int p = 0; p < P; p++)
    for (int m = 0; m < M; m++)
      for (int half = 0; half < 2; half++) {
        if constexpr (std::is_same_v<W, int8_t>) {
          const W* scales = w + (p * rows_of<W>(K) + K) * kPanel + half * kLanes * sizeof(float);
          sums[p][m][half] = sums[p][m][half] * V::loadu(scales);
        }
        store_half(sums[p][m][half], to, m, p * kPanel + half * kLanes);
      }
}

// Panels computed together, enough of them to hide the latency of additions, where their sums fit into
// the registers: AVX-512 has 32 of them, AVX2 16, of which weights that become floats take some.
template <typename W>
constexpr int panels_at_once(int M) {
  constexpr int kMost = kLanes == 16 ? 4 : std::is_same_v<W, float> ? 3 : 2;
  return M == 1 ? 4 : M <= kMost ? 2 : 1;
}

template <typename W>
constexpr int panels_of(const Panels<W>*, int M) {
  return panels_at_once<W>(M);
}

// Not inlined: within multiply_panels the compiler allots registers worse, and with AVX2 layers of 4
// bits take a tenth longer.
template <int M, typename Weights>
__attribute__((noinline)) void tokens(const float* x, Weights weights, Target to, int64_t panels) {
  constexpr int P = panels_of(static_cast<const Weights*>(nullptr), M);
  auto next = [&](int count) {
    weights = weights + count;
    to.y += count * kPanel;
    if (to.bias) to.bias += count * kPanel;
    to.outputs -= count * kPanel;
    panels -= count;
  };
  while (panels >= P) {
    tile<M, P>(x, weights, to);
    next(P);
  }
  if constexpr (P > 1)
    while (panels) {
      tile<M, 1>(x, weights, to);
      next(1);
    }
}

// Tokens computed together. AVX-512 has registers for the sums of twice as many, but only bfloat16
// weights use them: each further kind of weights takes the compiler seconds longer.
template <typename Weights>
constexpr int64_t kTokens = kTile;

template <>
constexpr int64_t kTokens<Panels<BFloat16>> = kLanes == 16 ? 2 * kTile : kTile;

// The panel in the layout that many tiles read fastest: a panel of floats as it is.
template <typename W>
Panels<W> unpacked(const Panels<W>& panel) {
  return panel;
}

constexpr int64_t kFewTiles = 4;  // tiles of tokens for which unpacking a panel costs more than it saves

// Any number of tokens, in tiles of nearly equal size; with several tiles, a panel stays in the
// processor's cache.
template <typename Weights>
void multiply_panels(int64_t M, const float* x, const Weights& weights, Target to,
                     int64_t panels) {
  constexpr int64_t kMost = kTokens<Weights>;
  const int64_t tiles = (M + kMost - 1) / kMost, at_once = tiles > 1 ? 1 : panels;
  for (int64_t p = 0; p < panels; p += at_once) {
    auto all_tiles = [&](const auto& panel) {
      for (int64_t i = 0; i < tiles; i++) {
        const int64_t first = M * i / tiles, last = M * (i + 1) / tiles;
        with_tokens<kMost>(last - first, [&](auto count) {
          tokens<count>(x + first * weights.K, panel, to.at(first, p * kPanel), at_once);
        });
      }
    };
    if (tiles > kFewTiles)
      all_tiles(unpacked(weights + p));
    else
      all_tiles(weights + p);
  }
}

}  // namespace outrider
