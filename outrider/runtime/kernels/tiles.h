// A linear layer over packed bfloat16 weights and bfloat16 inputs, by the processor's matrix unit
// (AMX): blocks of 16 tokens, 16 outputs and 32 inputs.
//
// The unit adds pairs of products before it adds them to a sum, so its sums are not those of the
// other kernels, and exact models do without it. OUTRIDER_EMULATED_TILES makes the kernel compute
// its blocks by plain code, which tests it on any processor.

#pragma once

#include <ATen/cpu/Utils.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "dots.h"

#if defined(__AMX_BF16__) && defined(__AMX_TILE__)
#include <immintrin.h>
#endif

namespace outrider {

constexpr int64_t kBlock = 16;  // tokens, outputs, and words of inputs of a block

#if defined(OUTRIDER_EMULATED_TILES)

constexpr bool kHasTiles = kPanel == 2 * kBlock;

struct EmulatedTiles {
  float sums[8][kBlock][kBlock];

  void load(int tile, const void* from, int64_t stride) {
    for (int64_t i = 0; i < kBlock; i++)
      std::memcpy(sums[tile][i], static_cast<const char*>(from) + i * stride, sizeof sums[tile][i]);
  }
  void store(int tile, void* to, int64_t stride) const {
    for (int64_t i = 0; i < kBlock; i++)
      std::memcpy(static_cast<char*>(to) + i * stride, sums[tile][i], sizeof sums[tile][i]);
  }
  static float half(float word, int shift) {
    uint32_t bits;
    std::memcpy(&bits, &word, sizeof bits);
    bits = shift ? bits << 16 : bits & 0xffff0000u;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
  void multiply(int to, int a, int b) {
    for (int64_t i = 0; i < kBlock; i++)
      for (int64_t j = 0; j < kBlock; j++) {
        float lower = 0, upper = 0;
        for (int64_t k = 0; k < kBlock; k++) {
          lower += half(sums[a][i][k], 16) * half(sums[b][k][j], 16);
          upper += half(sums[a][i][k], 0) * half(sums[b][k][j], 0);
        }
        sums[to][i][j] += lower + upper;
      }
  }
};

inline thread_local EmulatedTiles emulated;
#define TILE_ZERO(tile) std::memset(emulated.sums[tile], 0, sizeof emulated.sums[tile])
#define TILE_LOAD(tile, from, stride) emulated.load(tile, from, stride)
#define TILE_STORE(tile, to, stride) emulated.store(tile, to, stride)
#define TILE_MULTIPLY(to, a, b) emulated.multiply(to, a, b)
inline bool request_tiles() { return true; }
struct TileConfiguration {};

#elif defined(__AMX_BF16__) && defined(__AMX_TILE__)

constexpr bool kHasTiles = kPanel == 2 * kBlock;

#define TILE_ZERO(tile) _tile_zero(tile)
#define TILE_LOAD(tile, from, stride) _tile_loadd(tile, from, stride)
#define TILE_STORE(tile, to, stride) _tile_stored(tile, to, stride)
#define TILE_MULTIPLY(to, a, b) _tile_dpbf16ps(to, a, b)

// Asks the operating system for the unit's registers.
inline bool request_tiles() { return at::cpu::init_amx(); }

// Gives all registers of this thread the size of a block, while it exists.
struct TileConfiguration {
  TileConfiguration() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } configuration;
    _tile_loadconfig(&configuration);
  }
  ~TileConfiguration() { _tile_release(); }
};

#else

constexpr bool kHasTiles = false;

#define TILE_ZERO(tile)
#define TILE_LOAD(tile, from, stride)
#define TILE_STORE(tile, to, stride)
#define TILE_MULTIPLY(to, a, b)
inline bool request_tiles() { return false; }
struct TileConfiguration {};

#endif

// Stores a block of sums, with the bias, at token 0 and output `first` of the target.
inline void store_block(const float* sums, const NarrowTarget& to, int64_t first) {
  const int64_t count = std::min(kBlock, to.outputs - first);
  for (int64_t m = 0; m < kBlock; m++)
    for (int64_t n = 0; n < count; n++)
      to.y[m * to.stride + first + n] =
          BFloat16(sums[m * kBlock + n] + (to.bias ? to.bias[first + n] : 0.f));
}

// One panel for 32 tokens, or for 16.
template <bool Both>
inline void tile_blocks(const PairedInputs& x, int64_t token, const BFloat16* panel,
                        const NarrowTarget& to) {
  TILE_ZERO(0);
  TILE_ZERO(1);
  if constexpr (Both) {
    TILE_ZERO(2);
    TILE_ZERO(3);
  }
  const int64_t stride = x.words * sizeof(int32_t), row = kPanel * sizeof(int32_t);
  for (int64_t k = 0; k < x.words; k += kBlock) {
    const BFloat16* weights = panel + 2 * k * kPanel;
    TILE_LOAD(6, weights, row);
    TILE_LOAD(7, weights + 2 * kBlock, row);
    TILE_LOAD(4, x.row(token) + k, stride);
    TILE_MULTIPLY(0, 4, 6);
    TILE_MULTIPLY(1, 4, 7);
    if constexpr (Both) {
      TILE_LOAD(5, x.row(token + kBlock) + k, stride);
      TILE_MULTIPLY(2, 5, 6);
      TILE_MULTIPLY(3, 5, 7);
    }
  }
  alignas(64) float sums[kBlock * kBlock];
  constexpr int64_t kStride = kBlock * sizeof(float);
  TILE_STORE(0, sums, kStride);
  store_block(sums, to.at(token, 0), 0);
  TILE_STORE(1, sums, kStride);
  store_block(sums, to.at(token, 0), kBlock);
  if constexpr (Both) {
    TILE_STORE(2, sums, kStride);
    store_block(sums, to.at(token + kBlock, 0), 0);
    TILE_STORE(3, sums, kStride);
    store_block(sums, to.at(token + kBlock, 0), kBlock);
  }
}

// Whether the blocks divide the inputs; tokens are at least a block.
inline bool fits_tiles(int64_t M, int64_t K) { return M >= kBlock && K % (2 * kBlock) == 0; }

// Any number of tokens from one block on; the last block overlaps the one before it.
inline void multiply_tiles(int64_t M, const PairedInputs& x, const Panels<BFloat16>& panels,
                           const NarrowTarget& to, int64_t count) {
  [[maybe_unused]] const TileConfiguration configuration;
  for (int64_t p = 0; p < count; p++) {
    const BFloat16* panel = (panels + p).weights;
    int64_t m = 0;
    for (; m + 2 * kBlock <= M; m += 2 * kBlock)
      tile_blocks<true>(x, m, panel, to.at(0, p * kPanel));
    for (; m < M; m += kBlock)
      tile_blocks<false>(x, std::min(m, M - kBlock), panel, to.at(0, p * kPanel));
  }
}

// Whether the matrix unit may be used, and computes what it should; asked once.
inline bool tiles_work() {
  static const bool work = [] {
    if (!kHasTiles || !request_tiles()) return false;
    constexpr int64_t kWords = 2 * kBlock, kTokens = kBlock + 3;
    std::vector<int32_t> x(kTokens * kWords);
    std::vector<BFloat16> weights(2 * kWords * kPanel), y(kTokens * kPanel);
    auto small = [](int64_t i) { return BFloat16(static_cast<float>(i * 37 % 17 - 8)); };
    for (size_t i = 0; i < x.size(); i++)
      x[i] = static_cast<int32_t>(static_cast<uint32_t>(small(2 * i).x) << 16 | small(2 * i + 1).x);
    for (size_t i = 0; i < weights.size(); i++) weights[i] = small(i / 3 + 5);
    multiply_tiles(kTokens, {x.data(), kWords}, {weights.data(), 2 * kWords},
                   {y.data(), kPanel, nullptr, kPanel}, 1);
    for (int64_t m = 0; m < kTokens; m++)
      for (int64_t n = 0; n < kPanel; n++) {
        float sum = 0;  // of small integers, so that every order of sums is exact
        for (int64_t k = 0; k < 2 * kWords; k++)
          sum += static_cast<float>(small(m * 2 * kWords + k)) *
                 static_cast<float>(weights[(k / 2 * kPanel + n) * 2 + 1 - k % 2]);
        if (y[m * kPanel + n].x != BFloat16(sum).x) {
          TORCH_WARN("the processor's matrix unit does not compute what it should: it is not used");
          return false;
        }
      }
    return true;
  }();
  return work;
}

}  // namespace outrider
