// A linear layer over weights of 8 or 4 bits in groups whose inputs are rounded to 8 bits, as in
// llama.cpp.
//
// A group of a token's inputs becomes integers x of at most 127 and a scale s_x, a 127th of the
// largest magnitude. With the weights s q + m of grouped.h, a group of an output adds
//
//     s (s_x Σ q x)  +  m (s_x Σ x)
//
// to its sum. Sums of integers are exact, so all that depends on an order is the addition of groups,
// from the first to the last: a token's result has the same bits whatever the number of tokens and
// the width of vectors. (Portable code does not fuse products and sums, and rounds once more.)
//
// Weights are (panels, groups, rows, kPanel, 1) bytes: those of grouped.h, but that integers are
// stored as u = q + bias, none below 0, in 32-bit words, one per output
//
//     8 bits   of four inputs
//     4 bits   of eight inputs, the first four in the lower halves (nibbles) of the bytes

#pragma once

#include <ATen/cpu/vec/functional.h>

#include "buffer.h"
#include "dots.h"
#include "grouped.h"

namespace outrider {

constexpr int64_t kChunk = 32;  // inputs, of which groups have a multiple

// Rounded inputs, and of each group the scale and -128 times the sum of its integers.
struct RoundedInputs {
  const int8_t* values;
  const float* scales;
  const int32_t* starts;
  int64_t K, groups;

  RoundedInputs from(int64_t token) const {
    return {values + token * K, scales + token * groups, starts + token * groups, K, groups};
  }
};

inline int32_t word_of(const int8_t* inputs) {
  int32_t four;
  std::memcpy(&four, inputs, sizeof four);
  return four;
}

// Stores numbers that are integers as bytes.
inline void store_bytes(const V& integers, int8_t* to) {
#if defined(CPU_CAPABILITY_AVX512)
  const __m128i bytes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(integers));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
#else
  float lanes[kLanes];
  integers.store(lanes);
  for (int64_t i = 0; i < kLanes; i++) to[i] = static_cast<int8_t>(static_cast<int32_t>(lanes[i]));
#endif
}

// Rounds a group of inputs, a multiple of kLanes; returns its scale. A group of zeros has a scale of
// 0, and one with a number that is not finite a scale that is not finite.
template <typename T>
inline float round_group(const T* x, int64_t count, int8_t* to, int32_t& start) {
  V largest = load(x).abs();
  for (int64_t i = kLanes; i < count; i += kLanes)
    largest = at::vec::maximum(largest, load(x + i).abs());
  const float magnitude = at::vec::vec_reduce_all<float>(
      [](V& one, V& other) { return at::vec::maximum(one, other); }, largest);
  const V inverse(magnitude < 1e-30f ? 0.f : 127.f / magnitude);
  const V shift(3 << 22);  // floats of this size are integers
  V total(0.f);
  for (int64_t i = 0; i < count; i += kLanes) {
    const V integers = load(x + i) * inverse + shift - shift;
    store_bytes(integers, to + i);
    total = total + integers;
  }
  start = -128 * static_cast<int32_t>(at::vec::vec_reduce_all<float>(
                     [](V& one, V& other) { return one + other; }, total));
  return magnitude / 127.f;
}

// The memory of rounded inputs.
class RoundedTokens {
 public:
  template <typename T>
  RoundedTokens(const T* x, int64_t M, int64_t K, int64_t group)
      : K_(K), groups_(K / group), values_(M * K), scales_(M * groups_), starts_(M * groups_) {
    for (int64_t i = 0; i < M * groups_; i++)
      scales_.data()[i] =
          round_group(x + i * group, group, values_.data() + i * group, starts_.data()[i]);
  }
  RoundedInputs inputs() const {
    return {values_.data(), scales_.data(), starts_.data(), K_, groups_};
  }

 private:
  int64_t K_, groups_;
  Buffer<int8_t> values_;
  Buffer<float> scales_;
  Buffer<int32_t> starts_;
};

// A vector of integers, and dots_of(sum, u, x), which adds to each 32-bit lane the products of four
// bytes u and four signed bytes x of at most 127. Without an instruction for it (OUTRIDER_DOTS), pairs
// of products are added in 16 bits, so that u may be 128 at most.
#if defined(CPU_CAPABILITY_AVX512)

using Integers = __m512i;
inline Integers load_integers(const int8_t* from) { return _mm512_loadu_si512(from); }
inline Integers all_lanes(int32_t value) { return _mm512_set1_epi32(value); }
inline V floats(Integers sums) { return _mm512_cvtepi32_ps(sums); }
inline Integers lower_nibbles(Integers u) { return _mm512_and_si512(u, _mm512_set1_epi8(15)); }
inline Integers upper_nibbles(Integers u) { return lower_nibbles(_mm512_srli_epi16(u, 4)); }

#if defined(__AVX512VNNI__)
#define OUTRIDER_DOTS
inline Integers dots_of(Integers sum, Integers u, Integers x) {
  return _mm512_dpbusd_epi32(sum, u, x);
}
#else
inline Integers dots_of(Integers sum, Integers u, Integers x) {
  const Integers pairs = _mm512_maddubs_epi16(u, x);
  return _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
}
inline Integers without_bias(Integers u) { return _mm512_xor_si512(u, _mm512_set1_epi8(-128)); }
inline Integers magnitude_of(Integers q) { return _mm512_abs_epi8(q); }
inline Integers with_sign(Integers x, Integers q) {
  return _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(q), _mm512_setzero_si512(), x);
}
#endif

#elif defined(CPU_CAPABILITY_AVX2)

using Integers = __m256i;
inline Integers load_integers(const int8_t* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}
inline Integers all_lanes(int32_t value) { return _mm256_set1_epi32(value); }
inline V floats(Integers sums) { return _mm256_cvtepi32_ps(sums); }
inline Integers lower_nibbles(Integers u) { return _mm256_and_si256(u, _mm256_set1_epi8(15)); }
inline Integers upper_nibbles(Integers u) { return lower_nibbles(_mm256_srli_epi16(u, 4)); }

#if defined(__AVXVNNI__)
#define OUTRIDER_DOTS
inline Integers dots_of(Integers sum, Integers u, Integers x) {
  return _mm256_dpbusd_avx_epi32(sum, u, x);
}
#else
inline Integers dots_of(Integers sum, Integers u, Integers x) {
  const Integers pairs = _mm256_maddubs_epi16(u, x);
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
inline Integers without_bias(Integers u) { return _mm256_xor_si256(u, _mm256_set1_epi8(-128)); }
inline Integers magnitude_of(Integers q) { return _mm256_abs_epi8(q); }
inline Integers with_sign(Integers x, Integers q) { return _mm256_sign_epi8(x, q); }
#endif

#else

typedef int32_t Integers __attribute__((vector_size(kLanes * sizeof(int32_t))));
inline Integers load_integers(const int8_t* from) {
  Integers words;
  std::memcpy(&words, from, sizeof words);
  return words;
}
inline Integers all_lanes(int32_t value) { return Integers{} + value; }
inline V floats(const Integers& sums) {
  typedef float Floats __attribute__((vector_size(kLanes * sizeof(float))));
  const Floats converted = __builtin_convertvector(sums, Floats);
  return V::loadu(&converted);
}
inline Integers lower_nibbles(const Integers& u) { return u & 0x0f0f0f0f; }
inline Integers upper_nibbles(const Integers& u) { return (u >> 4) & 0x0f0f0f0f; }

#define OUTRIDER_DOTS
inline Integers dots_of(Integers sum, const Integers& u, const Integers& x) {
  for (int shift = 0; shift < 32; shift += 8)
    sum += (u >> shift & 255) * (x << (24 - shift) >> 24);
  return sum;
}

#endif

// Bytes u below 2^Bits; dots() adds the products of u - kBias and x.
template <int Bits>
struct Factors {
  static constexpr int kBias = 0;
  Integers u;

  explicit Factors(Integers bytes) : u(bytes) {}
  Integers dots(Integers sum, Integers x) const { return dots_of(sum, u, x); }
};

#if !defined(OUTRIDER_DOTS)
// q x = |q| (x with the sign of q), for q = u - 128.
template <>
struct Factors<8> {
  static constexpr int kBias = 128;
  Integers q, magnitude;

  explicit Factors(Integers bytes) : q(without_bias(bytes)), magnitude(magnitude_of(q)) {}
  Integers dots(Integers sum, Integers x) const {
    return dots_of(sum, magnitude, with_sign(x, q));
  }
};
#endif

// Consecutive panels of a layer.
template <int Bits, bool Offset>
struct IntegerPanels {
  static constexpr int64_t kInputs = 32 / Bits;                 // of a word
  static constexpr int64_t kWords = kPanel * sizeof(int32_t);  // bytes of a word per output
  static constexpr int64_t kHead = (Offset ? 2 : 1) * kHalfRows * kPanel;  // bytes before words
  const int8_t* bytes;
  int64_t K, group;

  int64_t group_bytes() const { return kHead + group / kInputs * kWords; }
  int64_t panel_bytes() const { return K / group * group_bytes(); }
  IntegerPanels operator+(int64_t count) const {
    return {bytes + count * panel_bytes(), K, group};
  }
};

// What the sum of a group starts with, for its part of the biases: -128 times the sum of its inputs is
// given.
template <int Bits, bool Offset>
inline Integers started(int32_t start) {
  if constexpr (Bits == 8) return all_lanes(Factors<8>::kBias ? 0 : start);
  return all_lanes(Offset ? 0 : start / 16);
}

constexpr int64_t kWordsAhead = 4096;  // bytes that are prefetched
constexpr int kIntegerTile = 6;  // tokens whose sums of a group fit into the registers

using Sums = float[kPanel];  // of a token and a panel

#define ALWAYS_INLINE __attribute__((always_inline))

// Calls act with the constants 0 to Count - 1.
template <int Count, typename F>
inline ALWAYS_INLINE void unrolled(const F& act) {
  [&]<int... I>(std::integer_sequence<int, I...>) ALWAYS_INLINE {
    (act(std::integral_constant<int, I>()), ...);
  }(std::make_integer_sequence<int, Count>());
}

// Adds the products of group g of M tokens, whose weights are at `from`, to their sums.
template <int M, int Bits, bool Offset>
inline void add_group(const RoundedInputs& x, int64_t g, const IntegerPanels<Bits, Offset>& panel,
                      const int8_t* from, Sums* __restrict sums) {
  using Format = IntegerPanels<Bits, Offset>;
  const int64_t K = x.K;
  Integers parts[M][2];
  unrolled<M>([&](auto m) ALWAYS_INLINE {
    parts[m][0] = parts[m][1] = started<Bits, Offset>(x.starts[m * x.groups + g]);
  });
  const int8_t *words = from + Format::kHead, *inputs = x.values + g * panel.group;
  for (const int8_t* end = inputs + panel.group; inputs < end; inputs += kChunk)
    unrolled<kChunk / Format::kInputs>([&](auto word) ALWAYS_INLINE {
      auto add = [&](Factors<Bits> low, Factors<Bits> high, int first) ALWAYS_INLINE {
        unrolled<M>([&](auto m) ALWAYS_INLINE {
          const Integers input = all_lanes(word_of(inputs + m * K + first));
          parts[m][0] = low.dots(parts[m][0], input);
          parts[m][1] = high.dots(parts[m][1], input);
        });
      };
      const Integers low = load_integers(words), high = load_integers(words + Format::kWords / 2);
      if constexpr (Bits == 8) {
        add(Factors<8>(low), Factors<8>(high), 4 * word);
      } else {
        add(Factors<4>(lower_nibbles(low)), Factors<4>(lower_nibbles(high)), 8 * word);
        add(Factors<4>(upper_nibbles(low)), Factors<4>(upper_nibbles(high)), 8 * word + 4);
      }
      words += Format::kWords;
    });
  const Pair scales = load_halves(from);
  unrolled<M>([&](auto m) ALWAYS_INLINE {
    const V scale(x.scales[m * x.groups + g]);
    Pair total = load_pair(sums[m]);
    total.low = at::vec::fmadd(floats(parts[m][0]) * scale, scales.low, total.low);
    total.high = at::vec::fmadd(floats(parts[m][1]) * scale, scales.high, total.high);
    if constexpr (Offset) {
      const Pair offsets = load_halves(from + kHalfRows * kPanel);
      const V inputs = scale * V(x.starts[m * x.groups + g] / -128.f);
      total.low = at::vec::fmadd(inputs, offsets.low, total.low);
      total.high = at::vec::fmadd(inputs, offsets.high, total.high);
    }
    total.low.store(sums[m]);
    total.high.store(sums[m] + kLanes);
  });
}

// The sums of M tokens for a panel; prefetches what is `ahead` bytes behind it, if anything.
template <int M, int Bits, bool Offset>
void integer_tile(const RoundedInputs& x, const IntegerPanels<Bits, Offset>& panel, int64_t ahead,
                  Sums* sums) {
  const int64_t bytes = panel.group_bytes();
  std::fill_n(sums[0], M * kPanel, 0.f);
  for (int64_t g = 0; g < x.groups; g++) {
    const int8_t* from = panel.bytes + g * bytes;
    if (ahead)
      for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(from + ahead + line);
    add_group<M>(x, g, panel, from, sums);
  }
}

// y = x wᵀ + bias for any number of tokens, in tiles of nearly equal size. With several tiles, a panel
// stays in the processor's cache, and the first tile prefetches the next panel.
template <int Bits, bool Offset, typename To>
void multiply_integers(int64_t M, const RoundedInputs& x, const IntegerPanels<Bits, Offset>& panels,
                       const To& to, int64_t count) {
  const int64_t tiles = (M + kIntegerTile - 1) / kIntegerTile;
  alignas(64) Sums sums[kIntegerTile];
  for (int64_t p = 0; p < count; p++)
    for (int64_t i = 0; i < tiles; i++) {
      const int64_t first = M * i / tiles, tokens = M * (i + 1) / tiles - first;
      const int64_t ahead = tiles == 1 ? kWordsAhead : i == 0 ? panels.panel_bytes() : 0;
      with_tokens<kIntegerTile>(tokens, [&](auto constant) {
        integer_tile<constant>(x.from(first), panels + p, ahead, sums);
      });
      const To part = to.at(first, p * kPanel);
      for (int64_t m = 0; m < tokens; m++)
        for (int64_t n = 0; n < kPanel; n += kLanes)
          store_half(V::loadu(sums[m] + n), part, m, n);
    }
}

}  // namespace outrider
