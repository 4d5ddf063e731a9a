// Multiplies weights of few bits by folded_tiles.h, emulated or by the unit itself; prints the first
// wrong result, if any. Integers are small, and scales and offsets powers of two, so that nothing is
// rounded.
#include <cstdio>

#include "folded_tiles.h"

using namespace outrider;

// The integer, of four bits, the scale and the offset of a weight.
int64_t integer(int64_t n, int64_t k) { return (n * 5 + k * 3) % 13; }
float scale(int64_t n, int64_t g) { return (n + g) % 2 ? 0.5f : 2.f; }
float offset(int64_t n, int64_t g) { return (n + 3 * g) % 4 - 1; }

// Sets a byte of a panel to an integer above its bias, in the format's own place.
template <int Bits, bool Offset>
void put(int8_t* group, const GroupedPanels<Bits, Offset>&, int64_t n, int64_t k, int64_t q) {
  if (Bits == 8) {
    group[k * kPanel + n] = q;
  } else {
    group[k / 8 * 4 * kPanel + n * 4 + k % 8 / 2] |= (q + (Offset ? 0 : 8)) << 4 * (k % 2);
  }
}
template <int Bits, bool Offset>
void put(int8_t* group, const IntegerPanels<Bits, Offset>&, int64_t n, int64_t k, int64_t q) {
  if (Bits == 8) {
    group[k / 4 * 4 * kPanel + n * 4 + k % 4] = q + 128;
  } else {
    group[k / 8 * 4 * kPanel + n * 4 + k % 4] |= (q + (Offset ? 0 : 8)) << 4 * (k % 8 / 4);
  }
}

template <template <int, bool> typename Panels, int Bits, bool Offset>
bool right(int64_t M, int64_t K, int64_t group, int64_t N) {
  const int64_t panels = (N + kPanel - 1) / kPanel, shift = Bits == 8 || Offset ? 0 : 6;
  Panels<Bits, Offset> shape{nullptr, K, group};
  std::vector<int8_t> bytes(panels * shape.panel_bytes());
  for (int64_t p = 0; p < panels; p++)
    for (int64_t g = 0; g < K / group; g++) {
      int8_t* at = &bytes[p * shape.panel_bytes() + g * shape.group_bytes()];
      for (int64_t n = 0; n < kPanel; n++) {
        const c10::Half s = scale(n, g), m = offset(n, g);
        std::memcpy(at + n * kHalfRows, &s, sizeof s);
        if (Offset) std::memcpy(at + kHalfRows * (kPanel + n), &m, sizeof m);
        for (int64_t k = 0; k < group; k++)
          put(at + shape.kHead, shape, n, k, integer(p * kPanel + n, g * group + k) - shift);
      }
    }
  std::vector<BFloat16> x(M * K), y(M * N, BFloat16(-1.f));
  for (size_t i = 0; i < x.size(); i++) x[i] = BFloat16(float(i * 29 % 7) - 3);
  std::vector<float> bias(N);
  for (int64_t n = 0; n < N; n++) bias[n] = n % 5;
  std::vector<int32_t> paired(M * words_of(K));
  for (int64_t m = 0; m < M; m++) pair_up(&x[m * K], K, &paired[m * words_of(K)]);
  shape.bytes = bytes.data();
  multiply_folded(M, {paired.data(), words_of(K)}, shape, NarrowTarget{y.data(), N, bias.data(), N},
                  panels);
  for (int64_t m = 0; m < M; m++)
    for (int64_t n = 0; n < N; n++) {
      float sum = 0;
      for (int64_t k = 0; k < K; k++) {
        const int64_t g = k / group;
        float weight = (integer(n, k) - shift) * scale(n % kPanel, g);
        if (Offset) weight += offset(n % kPanel, g);
        sum += float(x[m * K + k]) * weight;
      }
      if (y[m * N + n].x != BFloat16(sum + bias[n]).x)
        return std::printf("%d bits, M %ld K %ld N %ld: token %ld, output %ld: %g, not %g\n", Bits, M,
                           K, N, m, n, float(y[m * N + n]), sum + bias[n]),
               false;
    }
  return true;
}

// Inputs of 8 bits become the products of their integers and their groups' scales.
bool inputs_are_right() {
  const int8_t values[64] = {127, -127, 5, 0, -1};
  const float scales[2] = {0.5f, 4.f};
  int32_t found[32];
  pair_up_rounded({values, scales, nullptr, 64, 2}, found);
  auto half = [&](int i) {
    return BFloat16(uint16_t(i % 2 ? found[i / 2] : found[i / 2] >> 16), BFloat16::from_bits());
  };
  for (int i = 0; i < 64; i++)
    if (float(half(i)) != values[i] * scales[i / 32]) return std::printf("input %d\n", i), false;
  return true;
}

int main() {
  if (!tiles_work()) return std::puts("the check at load fails"), 1;
  if (!inputs_are_right()) return 1;
  for (int64_t M : {2, 17, 49})
    for (int64_t K : {64, 192})
      for (int64_t group : {32, 64})
        for (int64_t N : {7, 70})
          if (!right<GroupedPanels, 8, false>(M, K, group, N) ||
              !right<GroupedPanels, 8, true>(M, K, group, N) ||
              !right<GroupedPanels, 4, false>(M, K, group, N) ||
              !right<GroupedPanels, 4, true>(M, K, group, N) ||
              !right<IntegerPanels, 8, false>(M, K, group, N) ||
              !right<IntegerPanels, 4, false>(M, K, group, N) ||
              !right<IntegerPanels, 4, true>(M, K, group, N))
            return 1;
  return std::puts("right"), 0;
}
