// A linear layer over packed bfloat16 weights and bfloat16 inputs, by the processor's matrix unit
// (AMX): blocks of 16 tokens, 16 outputs and 32 inputs.
//
// The unit adds pairs of products before it adds them to a sum, so its sums are not those of the
// other kernels, and exact models do without it. OUTRIDER_EMULATED_TILES makes the kernel compute
// its blocks by plain code, which tests it on any processor.

#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "dots.h"

#if defined(__AMX_BF16__) && defined(__AMX_TILE__)
#include <immintrin.h>

namespace at::cpu {
bool init_amx();  // of ATen/cpu/Utils.h, which reads the headers of at::Tensor
}
#endif

namespace outrider {

constexpr int64_t kBlock = 16;  // tokens, outputs, and words of inputs of a block
constexpr int64_t kTilesAhead = 4096;  // bytes that are prefetched
constexpr int64_t kVectorsAhead = 768;  // and weights, of each panel

// Lets the compiler write all before the unit reads it: it does not know what memory the intrinsics
// read.
inline void written(const void* memory) { __asm__ volatile("" : : "r"(memory) : "memory"); }

// Rows of the registers: 0 to 3 hold sums, 4 and 5 inputs, 6 and 7 weights. Registers 2, 3 and 5
// belong to a second block of tokens, or 2 and 3 to a second panel.
struct TileRows {
  int64_t rows[8];

  // Tokens of the two blocks; with no second one, there are two panels.
  TileRows(int64_t first, int64_t second)
      : rows{first, first, second, second, first, second, kBlock, kBlock} {
    if (!second) rows[2] = rows[3] = first, rows[5] = kBlock;
  }
};

#if defined(OUTRIDER_EMULATED_TILES)

constexpr bool kHasTiles = kPanel == 2 * kBlock;

struct EmulatedTiles {
  float sums[8][kBlock][kBlock];
  int64_t rows[8];

  void load(int tile, const void* from, int64_t stride) {
    for (int64_t i = 0; i < rows[tile]; i++)
      std::memcpy(sums[tile][i], static_cast<const char*>(from) + i * stride, sizeof sums[tile][i]);
  }
  void store(int tile, void* to, int64_t stride) const {
    for (int64_t i = 0; i < rows[tile]; i++)
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
    for (int64_t i = 0; i < rows[to]; i++)
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

struct TileConfiguration {
  TileConfiguration(int64_t first, int64_t second) {
    const TileRows rows(first, second);
    std::copy_n(rows.rows, 8, emulated.rows);
  }
};

#elif defined(__AMX_BF16__) && defined(__AMX_TILE__)

constexpr bool kHasTiles = kPanel == 2 * kBlock;

#define TILE_ZERO(tile) _tile_zero(tile)
#define TILE_LOAD(tile, from, stride) _tile_loadd(tile, from, stride)
#define TILE_STORE(tile, to, stride) _tile_stored(tile, to, stride)
#define TILE_MULTIPLY(to, a, b) _tile_dpbf16ps(to, a, b)

// Asks the operating system for the unit's registers.
inline bool request_tiles() { return at::cpu::init_amx(); }

// Gives this thread's registers their numbers of rows, while it exists.
struct TileConfiguration {
  TileConfiguration(int64_t first, int64_t second) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {};
    } configuration;
    const TileRows rows(first, second);
    std::copy_n(rows.rows, 8, configuration.rows);
    written(&configuration);
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

struct TileConfiguration {
  TileConfiguration(int64_t, int64_t) {}
};

#endif

// Stores the sums of a panel's two halves for some tokens, with the bias.
#define STORE_TILES(left, right, target, tokens)                                          \
  {                                                                                       \
    alignas(64) float sums[2][kBlock * kBlock];                                           \
    TILE_STORE(left, sums[0], kBlock * sizeof(float));                                    \
    TILE_STORE(right, sums[1], kBlock * sizeof(float));                                   \
    for (int64_t m = 0; m < (tokens); m++)                                                \
      for (int64_t half = 0; half < 2; half++)                                            \
        store_half(V::loadu(sums[half] + m * kBlock), target, m, half * kBlock);          \
  }

// Weights of P panels for a block's inputs. Tiles come from memory more slowly than vectors, so
// vectors copy the weights, and the unit finds them in the first cache.
template <int P>
struct alignas(64) WeightBlocks {
  BFloat16 of_panel[P][2 * kBlock * kPanel];

  // The panels are `size` weights apart; after the last of their inputs, the next P panels follow.
  void copy(const BFloat16* from, int64_t size, bool last) {
    constexpr int64_t kLines = 2 * kBlock, kLeft = kLines - kVectorsAhead / kPanel;
    auto lines = [&](int64_t first, int64_t end, int64_t ahead) {
      for (int64_t i = first * kPanel; i < end * kPanel; i += kPanel)
        for (int64_t p = 0; p < P; p++) {
          const BFloat16* next = from + p * size + i;
          __builtin_prefetch(next + ahead);
          std::memcpy(of_panel[p] + i, next, kPanel * sizeof *next);
        }
    };
    lines(0, kLeft, kVectorsAhead);
    lines(kLeft, kLines, kVectorsAhead + (last ? (P - 1) * size : 0));
    written(this);
  }
};

// The processor's own prefetching does not follow loads of tiles.
inline void prefetch_tiles(const BFloat16* weights) {
  const char* next = reinterpret_cast<const char*>(weights) + kTilesAhead;
  for (int64_t i = 0; i < 2 * kBlock; i++) __builtin_prefetch(next + 64 * i);
}

constexpr int64_t kPanelRow = kPanel * sizeof(int32_t);  // bytes of a panel's word per output

// One panel for up to 32 tokens, the first 16 of them in a block of their own.
template <typename To>
inline void many_tokens(const PairedInputs& x, const BFloat16* panel, const To& to, int64_t second) {
  TILE_ZERO(0);
  TILE_ZERO(1);
  TILE_ZERO(2);
  TILE_ZERO(3);
  const int64_t stride = x.words * sizeof(int32_t);
  for (int64_t k = 0; k < x.words; k += kBlock) {
    const BFloat16* weights = panel + 2 * k * kPanel;
    prefetch_tiles(weights);
    TILE_LOAD(4, x.row(0) + k, stride);
    TILE_LOAD(6, weights, kPanelRow);
    TILE_MULTIPLY(0, 4, 6);
    TILE_LOAD(7, weights + 2 * kBlock, kPanelRow);
    TILE_MULTIPLY(1, 4, 7);
    TILE_LOAD(5, x.row(kBlock) + k, stride);
    TILE_MULTIPLY(2, 5, 6);
    TILE_MULTIPLY(3, 5, 7);
  }
  STORE_TILES(0, 1, to, kBlock);
  STORE_TILES(2, 3, to.at(kBlock, 0), second);
}

// P panels for up to 16 tokens.
template <int P, typename To>
inline void few_tokens(const PairedInputs& x, const BFloat16* panel, const To& to, int64_t tokens) {
  TILE_ZERO(0);
  TILE_ZERO(1);
  TILE_ZERO(2);
  TILE_ZERO(3);
  const int64_t stride = x.words * sizeof(int32_t), size = 2 * x.words * kPanel;
  WeightBlocks<P> blocks;
  const BFloat16 *weights = blocks.of_panel[0], *second = blocks.of_panel[P - 1];
  for (int64_t k = 0; k < x.words; k += kBlock) {
    blocks.copy(panel + 2 * k * kPanel, size, k + kBlock == x.words);
    TILE_LOAD(4, x.row(0) + k, stride);
    TILE_LOAD(6, weights, kPanelRow);
    TILE_MULTIPLY(0, 4, 6);
    TILE_LOAD(7, weights + 2 * kBlock, kPanelRow);
    TILE_MULTIPLY(1, 4, 7);
    if constexpr (P == 2) {
      TILE_LOAD(6, second, kPanelRow);
      TILE_MULTIPLY(2, 4, 6);
      TILE_LOAD(7, second + 2 * kBlock, kPanelRow);
      TILE_MULTIPLY(3, 4, 7);
    }
  }
  STORE_TILES(0, 1, to, tokens);
  if constexpr (P == 2) STORE_TILES(2, 3, to.at(0, kPanel), tokens);
}

// Any number of tokens; To is a Target or a NarrowTarget. Beyond 32 tokens, the last block overlaps
// the one before it.
template <typename To>
void multiply_tiles(int64_t M, const PairedInputs& x, const Panels<BFloat16>& panels, const To& to,
                    int64_t count) {
  if (M <= kBlock) {
    [[maybe_unused]] const TileConfiguration configuration(M, 0);
    int64_t p = 0;
    for (; p + 2 <= count; p += 2)
      few_tokens<2>(x, (panels + p).weights, to.at(0, p * kPanel), M);
    if (p < count) few_tokens<1>(x, (panels + p).weights, to.at(0, p * kPanel), M);
    return;
  }
  const int64_t second = std::min(M, 2 * kBlock) - kBlock;
  [[maybe_unused]] const TileConfiguration configuration(kBlock, second);
  for (int64_t p = 0; p < count; p++) {
    const BFloat16* panel = (panels + p).weights;
    for (int64_t m = 0; m < M; m += 2 * kBlock)
      if (M > 2 * kBlock && M - m <= kBlock) {
        const int64_t first = M - kBlock;
        few_tokens<1>({x.row(first), x.words}, panel, to.at(first, p * kPanel), kBlock);
      } else {
        const int64_t first = std::max<int64_t>(0, std::min(m, M - 2 * kBlock));
        many_tokens({x.row(first), x.words}, panel, to.at(first, p * kPanel), second);
      }
  }
}

// Whether the matrix unit may be used, and computes what it should; asked once.
inline bool tiles_work() {
  static const bool work = [] {
    if (!kHasTiles || !request_tiles()) return false;
    constexpr int64_t kWords = 2 * kBlock, kTokens = 3 * kBlock + 3;
    std::vector<int32_t> x(kTokens * kWords);
    std::vector<BFloat16> weights(2 * kWords * kPanel), y(kTokens * kPanel);
    auto small = [](int64_t i) { return BFloat16(static_cast<float>(i * 37 % 17 - 8)); };
    for (size_t i = 0; i < x.size(); i++)
      x[i] = static_cast<int32_t>(static_cast<uint32_t>(small(2 * i).x) << 16 | small(2 * i + 1).x);
    for (size_t i = 0; i < weights.size(); i++) weights[i] = small(i / 3 + 5);
    for (int64_t tokens : {kBlock - 3, kTokens}) {
      multiply_tiles(tokens, {x.data(), kWords}, {weights.data(), 2 * kWords},
                     NarrowTarget{y.data(), kPanel, nullptr, kPanel}, 1);
      for (int64_t m = 0; m < tokens; m++)
        for (int64_t n = 0; n < kPanel; n++) {
          float sum = 0;  // of small integers, so that every order of sums is exact
          for (int64_t k = 0; k < 2 * kWords; k++)
            sum += static_cast<float>(small(m * 2 * kWords + k)) *
                   static_cast<float>(weights[(k / 2 * kPanel + n) * 2 + 1 - k % 2]);
          if (y[m * kPanel + n].x != BFloat16(sum).x) {
            TORCH_WARN("the processor's matrix unit computes wrong results: it is not used");
            return false;
          }
        }
      std::fill(y.begin(), y.end(), BFloat16(0.f));
    }
    return true;
  }();
  return work;
}

// Whether M tokens of K inputs go to the matrix unit, whose blocks must divide the inputs.
inline bool use_tiles(int64_t M, int64_t K) {
  return kHasTiles && M >= OUTRIDER_TILES_FROM && K % (2 * kBlock) == 0 && tiles_work();
}

}  // namespace outrider
