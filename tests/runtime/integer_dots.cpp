// Adds products of bytes by integer_dots.h, at the extremes of both; prints the first wrong result, if
// any.
#include <cstdio>

#include "integer_dots.h"

using namespace outrider;

template <int Bits>
bool right() {
  constexpr int64_t kBytes = sizeof(Integers);
  uint8_t u[kBytes];
  int8_t x[kBytes];
  const int top = (1 << Bits) - 1;
  for (int round = 0; round < 256; round++) {
    for (int64_t i = 0; i < kBytes; i++) {
      u[i] = round < 2 ? top * round : (i * 37 + round * 11) & top;
      x[i] = round % 3 == 0 ? 127 : round % 3 == 1 ? -127 : (i * 29 + round) % 255 - 127;
    }
    const Factors<Bits> factors(load_integers((int8_t*)u));
    const Integers found = factors.dots(all_lanes(round - 9), load_integers(x));
    int32_t lanes[kBytes / 4];
    std::memcpy(lanes, &found, sizeof lanes);
    for (int64_t i = 0; i < kBytes / 4; i++) {
      int32_t sum = round - 9;
      for (int64_t j = 4 * i; j < 4 * i + 4; j++) sum += (u[j] - Factors<Bits>::kBias) * x[j];
      if (lanes[i] != sum)
        return std::printf("%d bits, lane %d: %d, not %d\n", Bits, int(i), lanes[i], sum), false;
    }
  }
  return true;
}

int main() {
  if (!right<8>() || !right<4>()) return 1;
  std::puts("right");
}
