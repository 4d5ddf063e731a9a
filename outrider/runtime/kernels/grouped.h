// A linear layer over packed weights of 8 or 4 bits with a scale per group of inputs.
//
//     w = s q        or, with an offset,        w = s q + m
//
// for the integers q of a group of `group` inputs of one output. Weights are (panels, groups, rows,
// kPanel) bytes; the rows of a group of a panel are
//
//     2          the scales s as float16
//     2 or none  the offsets m as float16
//     group      the integers q of 8 bits, a row per input, or
//     group / 2  the integers of 4 bits, q + 8 where there is no offset, else q: a 32-bit word per
//                output has those of 8 inputs, the first in its lowest bits
//
// A weight becomes one float32 before it is multiplied: s q is exact, since float16 has 11 bits and
// q at most 8, and adding m rounds once. Sums run as over float32 weights (packed.h), so a layer
// computes what a layer of the same weights in float32 does, to the bit.

#pragma once


#include <c10/util/Half.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "packed.h"
#include "tensor.h"

namespace outrider {

constexpr int64_t kHalfRows = sizeof(c10::Half);  // rows that hold a float16 per output

inline V load_half(const int8_t* from) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(CPU_CAPABILITY_AVX2)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  c10::Half halves[kLanes];
  std::memcpy(halves, from, sizeof halves);
  float floats[kLanes];
  std::copy(halves, halves + kLanes, floats);
  return V::loadu(floats);
#endif
}

inline Pair load_halves(const int8_t* from) {
  return {load_half(from), load_half(from + kLanes * kHalfRows)};
}

constexpr int kStep = 8;  // inputs of a group whose integers are unpacked at once

// The integers of kStep inputs for the outputs of a panel.
template <int Bits, bool Offset>
struct Step;

template <bool Offset>
struct Step<8, Offset> {
  const int8_t* from;

  explicit Step(const int8_t* bytes) : from(bytes) {}
  Pair at(int input) const { return load_pair(from + input * kPanel); }
};

#if defined(CPU_CAPABILITY_AVX512)

template <bool Offset>
struct Step<4, Offset> {
  static constexpr int kBias = Offset ? 0 : 8;
  __m512i low, high;

  explicit Step(const int8_t* bytes)
      : low(_mm512_loadu_si512(bytes)), high(_mm512_loadu_si512(bytes + sizeof(__m512i))) {}

  static V look_up(__m512i words, int input) {
    const __m512 floats = _mm512_setr_ps(
        0 - kBias, 1 - kBias, 2 - kBias, 3 - kBias, 4 - kBias, 5 - kBias, 6 - kBias, 7 - kBias,
        8 - kBias, 9 - kBias, 10 - kBias, 11 - kBias, 12 - kBias, 13 - kBias, 14 - kBias,
        15 - kBias);
    // the instruction reads the lowest four bits of each index
    return _mm512_permutexvar_ps(_mm512_srli_epi32(words, 4 * input), floats);
  }
  Pair at(int input) const { return {look_up(low, input), look_up(high, input)}; }
};

#else

template <bool Offset>
struct Step<4, Offset> {
  typedef int32_t Words __attribute__((vector_size(kLanes * sizeof(int32_t))));
  typedef float Floats __attribute__((vector_size(kLanes * sizeof(float))));
  Words low, high;

  explicit Step(const int8_t* bytes) {
    std::memcpy(&low, bytes, sizeof low);
    std::memcpy(&high, bytes + sizeof low, sizeof high);
  }

  static V floats(const Words& words, int input) {
    const Words values = ((words >> (4 * input)) & 15) - (Offset ? 0 : 8);
    const Floats converted = __builtin_convertvector(values, Floats);
    return V::loadu(&converted);
  }
  Pair at(int input) const { return {floats(low, input), floats(high, input)}; }
};

#endif

// Consecutive panels of a layer with K inputs.
template <int Bits, bool Offset>
struct GroupedPanels {
  static constexpr bool kOffset = Offset;
  static constexpr int64_t kHead = (Offset ? 2 : 1) * kHalfRows * kPanel;  // bytes before integers
  static constexpr int64_t kStepBytes = kStep * kPanel * Bits / 8;
  const int8_t* bytes;
  int64_t K, group;

  int64_t group_bytes() const { return kHead + group / kStep * kStepBytes; }
  int64_t panel_bytes() const { return K / group * group_bytes(); }
  GroupedPanels operator+(int64_t count) const {
    return {bytes + count * panel_bytes(), K, group};
  }
};

template <int Bits, bool Offset>
constexpr int panels_of(const GroupedPanels<Bits, Offset>*, int M) {
  return M == 1 ? 2 : 1;
}

// The scales and offsets of a group.
template <bool Offset>
struct Affine {
  Pair scale, offset;

  explicit Affine(const int8_t* head) : scale(load_halves(head)) {
    if constexpr (Offset) offset = load_halves(head + kHalfRows * kPanel);
  }
  Affine() = default;

  Pair weights(const Pair& q) const {
    if constexpr (Offset)
      return {at::vec::fmadd(q.low, scale.low, offset.low),
              at::vec::fmadd(q.high, scale.high, offset.high)};
    return {q.low * scale.low, q.high * scale.high};
  }
};

// y = x wᵀ + bias for M tokens and P panels.
template <int M, int P, int Bits, bool Offset>
inline void tile(const float* x, const GroupedPanels<Bits, Offset>& panels, const Target& to) {
  using Format = GroupedPanels<Bits, Offset>;
  const int64_t panel_bytes = panels.panel_bytes();
  V sums[P][M][2];
  for (int p = 0; p < P; p++)
    for (int m = 0; m < M; m++) sums[p][m][0] = sums[p][m][1] = V(0.f);
  const int8_t* from = panels.bytes;
  for (int64_t k = 0; k < panels.K;) {
    Affine<Offset> affine[P];
    for (int p = 0; p < P; p++) affine[p] = Affine<Offset>(from + p * panel_bytes);
    from += Format::kHead;
    for (const int64_t end = k + panels.group; k < end; k += kStep) {
      for (int p = 0; p < P; p++) {
        const int8_t* bytes = from + p * panel_bytes;
        for (int64_t line = 0; line < Format::kStepBytes; line += 64)
          __builtin_prefetch(bytes + kAhead / P + line);
        const Step<Bits, Offset> step(bytes);
#pragma GCC unroll 8
        for (int i = 0; i < kStep; i++) {
          const Pair weights = affine[p].weights(step.at(i));
          for (int m = 0; m < M; m++) {
            const V input(x[m * panels.K + k + i]);
            add_product<int8_t>(sums[p][m][0], input, weights.low);
            add_product<int8_t>(sums[p][m][1], input, weights.high);
          }
        }
      }
      from += Format::kStepBytes;
    }
  }
  for (int p = 0; p < P; p++)
    for (int m = 0; m < M; m++)
      for (int half = 0; half < 2; half++)
        store_half(sums[p][m][half], to, m, p * kPanel + half * kLanes);
}

// The weights of a panel in float32, in a buffer of this thread that the next call overwrites.
template <int Bits, bool Offset>
Panels<float> unpacked(const GroupedPanels<Bits, Offset>& panel) {
  thread_local std::vector<float> buffer;
  buffer.resize(panel.K * kPanel);
  float* to = buffer.data();
  const int8_t* from = panel.bytes;
  for (int64_t k = 0; k < panel.K;) {
    const Affine<Offset> affine(from);
    from += panel.kHead;
    for (const int64_t end = k + panel.group; k < end; k += kStep, from += panel.kStepBytes) {
      const Step<Bits, Offset> step(from);
#pragma GCC unroll 8
      for (int i = 0; i < kStep; i++, to += kPanel) {
        const Pair weights = affine.weights(step.at(i));
        weights.low.store(to);
        weights.high.store(to + kLanes);
      }
    }
  }
  return {buffer.data(), panel.K};
}

// What the shape of a packed layer with K inputs tells of it.
struct Format {
  int64_t group, bits;
  bool offset;

  Format(const Tensor& weight, int64_t K) : group(K / weight.size(1)) {
    const int64_t rows = weight.size(2);
    bits = rows > group ? 8 : 4;
    offset = rows - group * bits / 8 > kHalfRows;
  }
};

// Calls act with the panels of a packed layer with K inputs.
template <typename F>
void with_format(const Tensor& weight, int64_t K, const F& act) {
  const int8_t* bytes = weight.const_data_ptr<int8_t>();
  const Format format(weight, K);
  const int64_t group = format.group;
  if (format.bits == 8 && format.offset) return act(GroupedPanels<8, true>{bytes, K, group});
  if (format.bits == 8) return act(GroupedPanels<8, false>{bytes, K, group});
  if (format.offset) return act(GroupedPanels<4, true>{bytes, K, group});
  return act(GroupedPanels<4, false>{bytes, K, group});
}

}  // namespace outrider
