// Multiplies integers by the blocks of tiles.h, emulated or by the unit itself; prints the first
// wrong result, if any.
#include <cstdio>

#include "tiles.h"

using namespace outrider;

int main() {
  if (!tiles_work()) return std::puts("the check at load fails"), 1;
  for (int64_t M : {1, 2, 15, 16, 17, 31, 32, 33, 48, 49, 70})
    for (int64_t K : {32, 96})
      for (int64_t N : {7, 32, 70}) {
        const int64_t panels = (N + kPanel - 1) / kPanel, words = K / 2;
        std::vector<BFloat16> x(M * K), w(panels * K * kPanel), y(M * N, BFloat16(-1.f));
        std::vector<float> bias(N);
        for (size_t i = 0; i < x.size(); i++) x[i] = BFloat16(float(i * 29 % 15) - 7);
        for (size_t i = 0; i < w.size(); i++) w[i] = BFloat16(float(i * 31 % 13) - 6);
        for (int64_t n = 0; n < N; n++) bias[n] = n % 5;
        std::vector<int32_t> paired(M * words);
        for (int64_t m = 0; m < M; m++) pair_up(&x[m * K], K, &paired[m * words]);
        multiply_tiles(M, {paired.data(), words}, {w.data(), K},
                       NarrowTarget{y.data(), N, bias.data(), N}, panels);
        for (int64_t m = 0; m < M; m++)
          for (int64_t n = 0; n < N; n++) {
            float sum = 0;
            for (int64_t k = 0; k < K; k++)
              sum += float(x[m * K + k]) *
                     float(w[n / kPanel * K * kPanel + (k / 2 * kPanel + n % kPanel) * 2 + 1 - k % 2]);
            if (y[m * N + n].x != BFloat16(sum + bias[n]).x)
              return std::printf("M %ld K %ld N %ld: token %ld, output %ld\n", M, K, N, m, n), 1;
          }
      }
  return std::puts("right"), 0;
}
