#include "truncate.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <vector>

#include "share.h"
#include "vectors.h"

namespace outrider {

namespace {

constexpr float kLower = 1.f / 32;  // how far the floor is lowered where too few tokens are above it
constexpr int64_t kFew = 32;        // tokens that are sorted instead of halved

// A token as one number: its probability, whose bits are ordered as it is, and then its id, so that
// of equally probable tokens the first one is the largest.
using Token = uint64_t;

Token token(float p, int64_t id) {
  return uint64_t{std::bit_cast<uint32_t>(p)} << 32 | (0xffffffffu - static_cast<uint32_t>(id));
}

float probability(Token token) { return std::bit_cast<float>(static_cast<uint32_t>(token >> 32)); }

int64_t id(Token token) { return 0xffffffffu - static_cast<uint32_t>(token); }

struct Parameters {
  int64_t top_k;
  float top_p;
  bool strict;
  float min_p;
};

float largest(const float* p, int64_t size) {
  V most(0.f);
  for (int64_t i = 0; i < size; i += kLanes)
    most = at::vec::maximum(most, V::loadu(p + i, std::min(kLanes, size - i)));
  float lanes[kLanes];
  most.store(lanes);
  return *std::max_element(lanes, lanes + kLanes);
}

// One row. Tokens are collected from a floor upwards, which is lowered until the parameters are
// known to keep none below it, so that few tokens are ranked.
class Row {
 public:
  Row(const float* p, int64_t size, std::vector<Token>& tokens)
      : p_(p), size_(size), tokens_(tokens), most_(largest(p, size)) {}

  void truncate(const Parameters& by, float* to) {
    double mass = 1;
    bool all = true;  // whether no tokens were dropped so far
    if (by.top_k > 0 && by.top_k < size_) {
      keep_top_k(by.top_k);
      mass = total();
      all = false;
    }
    if (by.top_p < 1) {
      keep_top_p(by.top_p * mass, by.strict, all);
      all = false;
    }
    if (by.min_p > 0) {
      const float floor = by.min_p * most_;
      if (all) collect(floor);
      auto below = [floor](Token each) { return !(probability(each) >= floor); };
      tokens_.erase(std::remove_if(tokens_.begin(), tokens_.end(), below), tokens_.end());
    }
    std::memset(to, 0, size_ * sizeof(float));
    const float sum = static_cast<float>(total());
    for (Token each : tokens_) to[id(each)] = probability(each) / sum;
  }

  bool healthy() const { return most_ > 0 && most_ <= 2; }

 private:
  void keep_top_k(int64_t k) {
    for (float floor = most_ * kLower; collect(floor), static_cast<int64_t>(tokens_.size()) < k;) {
      if (floor == 0) return;
      floor = lowered(floor);
    }
    auto kth = tokens_.begin() + (k - 1);
    std::nth_element(tokens_.begin(), kth, tokens_.end(), std::greater<>());
    const float least = probability(*kth);
    auto below = [least](Token each) { return probability(each) < least; };
    tokens_.erase(std::remove_if(tokens_.begin(), tokens_.end(), below), tokens_.end());
  }

  void keep_top_p(double mass, bool strict, bool all) {
    if (all)
      for (float floor = most_ * kLower; collect(floor), floor > 0 && total() <= mass;)
        floor = lowered(floor);
    auto reached = [=](double before) { return strict ? before > mass : before >= mass; };
    // The tokens before `first` are kept, and those from `last` on dropped.
    auto first = tokens_.begin(), last = tokens_.end();
    double before = 0;
    while (last - first > kFew) {
      const auto middle = first + (last - first) / 2;
      std::nth_element(first, middle, last, std::greater<>());
      double half = 0;
      for (auto each = first; each != middle; ++each) half += probability(*each);
      if (reached(before + half)) {
        last = middle;
      } else {
        before += half;
        first = middle;
      }
    }
    std::sort(first, last, std::greater<>());
    for (; first != last; ++first) {
      if (first != tokens_.begin() && reached(before)) break;
      before += probability(*first);
    }
    tokens_.erase(first, tokens_.end());
  }

  static float lowered(float floor) { return floor > 1e-30f ? floor * kLower : 0.f; }

  // All tokens at least as probable as the floor, by id.
  void collect(float floor) {
    tokens_.clear();
    const V floors(floor);
    int64_t i = 0;
    for (; i + kLanes <= size_; i += kLanes) {
      const V below = V::loadu(p_ + i) < floors;
      if (below.zero_mask() == 0) continue;  // a lane that compares true has no zero
      for (int64_t j = i; j < i + kLanes; j++) take(j, floor);
    }
    for (; i < size_; i++) take(i, floor);
  }

  void take(int64_t id, float floor) {
    if (p_[id] >= floor) tokens_.push_back(token(p_[id], id));
  }

  double total() const {
    double sum = 0;
    for (Token each : tokens_) sum += probability(each);
    return sum;
  }

  const float* p_;
  const int64_t size_;
  std::vector<Token>& tokens_;
  const float most_;
};

}  // namespace

Tensor truncated(const Tensor& p, const Tensor& top_k, const Tensor& top_p,
                 const Tensor& strict, const Tensor& min_p) {
  const Tensor input = contiguous(p, c10::kFloat);
  Tensor output = allocate(input.sizes(), c10::kFloat);
  const int64_t size = p.size(-1), each = p.numel() / std::max<int64_t>(p.size(0) * size, 1);
  const float* from = input.const_data_ptr<float>();
  float* to = output.mutable_data_ptr<float>();
  const int64_t* ks = top_k.const_data_ptr<int64_t>();
  const float *top_ps = top_p.const_data_ptr<float>(), *min_ps = min_p.const_data_ptr<float>();
  const bool* stricts = strict.const_data_ptr<bool>();
  share(p.size(0) * each, 1, 4 * size, [&](int64_t begin, int64_t end) {
    thread_local std::vector<Token> tokens;
    for (int64_t row = begin; row < end; row++) {
      const int64_t b = row / each;
      const Parameters by{ks[b], top_ps[b], stricts[b], min_ps[b]};
      const bool off = (by.top_k <= 0 || by.top_k >= size) && by.top_p >= 1 && by.min_p <= 0;
      const float* values = from + row * size;
      if (!off) {
        Row whole(values, size, tokens);
        if (whole.healthy()) {
          whole.truncate(by, to + row * size);
          continue;
        }
      }
      std::memcpy(to + row * size, values, size * sizeof(float));
    }
  });
  return output;
}

}  // namespace outrider
