#include "elementwise.h"

#include <algorithm>
#include <cmath>

#include "allocate.h"
#include "share.h"
#include "vectors.h"

namespace outrider {

static inline V exp_of(const V& x) { return x.exp(); }
static inline V tanh_of(const V& x) { return x.tanh(); }
static inline V sin_of(const V& x) { return x.sin(); }
static inline V cos_of(const V& x) { return x.cos(); }
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
static at::Tensor elementwise(const at::Tensor& x) {
  const at::Tensor input = x.to(at::kFloat).contiguous();
  at::Tensor output = allocate(input.sizes(), at::kFloat);
  const float* from = input.const_data_ptr<float>();
  float* to = output.mutable_data_ptr<float>();
  const int64_t size = input.numel(), vectors = (size + kLanes - 1) / kLanes;
  share(vectors, 256, 16 * kLanes, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * kLanes; i < std::min(size, end * kLanes); i += kLanes) {
      const int64_t count = std::min(kLanes, size - i);
      f(V::loadu(from + i, count)).store(to + i, count);
    }
  });
  return output.to(x.scalar_type());
}

#define OUTRIDER_DEFINE(name) \
  at::Tensor name(const at::Tensor& x) { return elementwise<name##_of>(x); }
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
static void each_row(const at::Tensor& input, const F& act) {
  const int64_t size = input.size(-1), rows = size ? input.numel() / size : 0;
  const float* from = input.const_data_ptr<float>();
  share(rows, 1, 4 * size, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) act(row, from + row * size, size);
  });
}

at::Tensor mean(const at::Tensor& x, bool keepdim) {
  const at::Tensor input = x.to(at::kFloat).contiguous();
  c10::DimVector sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = 1;
  at::Tensor means = allocate(sizes, at::kFloat);
  float* to = means.mutable_data_ptr<float>();
  each_row(input, [&](int64_t row, const float* from, int64_t size) {
    to[row] = sum_row(from, size, [](const V& v) { return v; }) / static_cast<float>(size);
  });
  return (keepdim ? means : means.squeeze(-1)).to(x.scalar_type());
}

at::Tensor layer_norm(const at::Tensor& x, const std::optional<at::Tensor>& weight,
                      const std::optional<at::Tensor>& bias, double eps) {
  const at::Tensor input = x.to(at::kFloat).contiguous();
  at::Tensor output = allocate(input.sizes(), at::kFloat);
  auto floats = [](const std::optional<at::Tensor>& each) {
    return each && each->defined() ? each->to(at::kFloat).contiguous() : at::Tensor();
  };
  const at::Tensor scale = floats(weight), shift = floats(bias);
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
  return output.to(x.scalar_type());
}

}  // namespace outrider
