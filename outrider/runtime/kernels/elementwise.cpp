#include "elementwise.h"

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cmath>

#include "share.h"
#include "vectors.h"

namespace outrider {

constexpr float kNear = 100.f;  // below 125, from which on torch reduces angles by other steps

static inline V near_sin(const V& x) { return x.sin(); }
static inline V near_cos(const V& x) { return x.cos(); }

// f of every angle; of each by itself if one is large. torch reduces all angles of a vector by the
// steps that its largest one needs, which give small ones other bits.
template <V (*f)(const V&)>
static inline V of_angles(const V& x) {
  float angles[kLanes];
  x.store(angles);
  bool near = true;
  for (const float angle : angles) near &= std::abs(angle) < kNear;
  if (near) return f(x);
  for (float& angle : angles) {
    float results[kLanes];
    f(V(angle)).store(results);
    angle = results[0];
  }
  return V::loadu(angles);
}

static inline V exp_of(const V& x) { return x.exp(); }
static inline V tanh_of(const V& x) { return x.tanh(); }
static inline V sin_of(const V& x) { return of_angles<near_sin>(x); }
static inline V cos_of(const V& x) { return of_angles<near_cos>(x); }
static inline V sigmoid_of(const V& x) { return V(1.f) / (V(1.f) + x.neg().exp()); }
static inline V silu_of(const V& x) { return x / (V(1.f) + x.neg().exp()); }
static inline V gelu_of(const V& x) {
  return V(0.5f) * x * (V(1.f) + (x * V(static_cast<float>(M_SQRT1_2))).erf());
}
static inline V gelu_tanh_of(const V& x) {
  const V inner = V(static_cast<float>(M_SQRT2 * M_2_SQRTPI / 2)) * (x + V(0.044715f) * x * x * x);
  return V(0.5f) * x * (V(1.f) + inner.tanh());
}

// f of every element of x.
template <V (*f)(const V&)>
static Tensor elementwise(const Tensor& x) {
  const Tensor input = contiguous(x, c10::kFloat);
  Tensor output = allocate(input.sizes(), c10::kFloat);
  const float* from = input.const_data_ptr<float>();
  float* to = output.mutable_data_ptr<float>();
  const int64_t size = input.numel(), vectors = (size + kLanes - 1) / kLanes;
  share(vectors, 256, 16 * kLanes, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * kLanes; i < std::min(size, end * kLanes); i += kLanes) {
      const int64_t count = std::min(kLanes, size - i);
      f(V::loadu(from + i, count)).store(to + i, count);
    }
  });
  return converted(std::move(output), x.scalar_type());
}

#define OUTRIDER_DEFINE(name) \
  Tensor name(const Tensor& x) { return elementwise<name##_of>(x); }
OUTRIDER_FUNCTIONS(OUTRIDER_DEFINE)

// The sum of act(vector) over the vectors of a row; act maps zeros, the padding, to zeros.
template <typename F>
static float sum_row(const float* row, int64_t size, const F& act) {
  V sums[4] = {V(0.f), V(0.f), V(0.f), V(0.f)};
  int64_t i = 0;
  for (; i + 4 * kLanes <= size; i += 4 * kLanes)
    for (int64_t part = 0; part < 4; part++)
      sums[part] = sums[part] + act(V::loadu(row + i + part * kLanes));
  for (int64_t part = 0; i < size; i += kLanes, part++)
    sums[part] = sums[part] + act(V::loadu(row + i, std::min(kLanes, size - i)));
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// Calls act(row, from, size) for every row of x, which is (…, size), in float32.
template <typename F>
static void each_row(const Tensor& input, const F& act) {
  const int64_t size = input.size(-1), rows = size ? input.numel() / size : 0;
  const float* from = input.const_data_ptr<float>();
  share(rows, 1, 4 * size, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) act(row, from + row * size, size);
  });
}

Tensor mean(const Tensor& x, bool keepdim) {
  const Tensor input = contiguous(x, c10::kFloat);
  c10::SmallVector<int64_t, 5> sizes(x.sizes().begin(), x.sizes().end());
  if (keepdim)
    sizes.back() = 1;
  else
    sizes.pop_back();
  Tensor means = allocate(sizes, c10::kFloat);
  float* to = means.mutable_data_ptr<float>();
  each_row(input, [&](int64_t row, const float* from, int64_t size) {
    to[row] = sum_row(from, size, [](const V& v) { return v; }) / static_cast<float>(size);
  });
  return converted(std::move(means), x.scalar_type());
}

Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  const Tensor input = contiguous(x, c10::kFloat);
  Tensor output = allocate(input.sizes(), c10::kFloat);
  auto floats = [](const Tensor& each) {
    return each.defined() ? contiguous(each, c10::kFloat) : Tensor();
  };
  const Tensor scale = floats(weight), shift = floats(bias);
  const float* scales = scale.defined() ? scale.const_data_ptr<float>() : nullptr;
  const float* shifts = shift.defined() ? shift.const_data_ptr<float>() : nullptr;
  float* results = output.mutable_data_ptr<float>();
  each_row(input, [&](int64_t row, const float* from, int64_t size) {
    const float n = static_cast<float>(size);
    const float mean = sum_row(from, size, [](const V& v) { return v; }) / n;
    float* to = results + row * size;
    for (int64_t i = 0; i < size; i++) to[i] = from[i] - mean;
    const float variance = sum_row(to, size, [](const V& v) { return v * v; }) / n;
    const float factor = 1.f / std::sqrt(variance + static_cast<float>(eps));
    for (int64_t i = 0; i < size; i++)
      to[i] = to[i] * factor * (scales ? scales[i] : 1.f) + (shifts ? shifts[i] : 0.f);
  });
  return converted(std::move(output), x.scalar_type());
}

}  // namespace outrider
