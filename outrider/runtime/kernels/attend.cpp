// Attention for forward passes over few tokens, on a CPU.

#include "attend.h"
#include "attend_wide.h"
#include "kernels.h"

namespace outrider {

constexpr int64_t kTileQueries = 5;  // queries of a group from which the matrix unit attends faster

// The tensor in a dtype, each number of a vector beside the next.
static Tensor along(const Tensor& x, c10::ScalarType dtype) {
  const bool is_along = x.scalar_type() == dtype && x.stride(3) == 1;
  return is_along ? Tensor::borrowed(x.handle()) : contiguous(x, dtype);
}

Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask, double scale,
              int64_t widest) {
  const float factor = static_cast<float>(scale);
  const auto dtype = q.scalar_type();
  const bool same = dtype == k.scalar_type() && dtype == v.scalar_type();
  const int64_t queries = q.size(2) * (q.size(1) / k.size(1));
  const bool tiles = widest < kAnyNumber && dtype == c10::kBFloat16 && queries >= kTileQueries &&
                     use_tiles(queries, q.size(3));
  const auto read = [](const Tensor& x) {  // bfloat16 as it is, all else as float32
    return x.scalar_type() == c10::kBFloat16 ? c10::kBFloat16 : c10::kFloat;
  };
  const Tensor key = along(k, k.scalar_type()), value = along(v, v.scalar_type());
  const Tensor expanded = expand(mask, std::array{q.size(0), int64_t{1}, q.size(2), k.size(2)});
  const Tensor added = along(expanded, read(mask));
  const std::array sizes{q.size(0), q.size(2), q.size(1), v.size(3)};
  if (same && (q.size(2) > widest || tiles)) {
    const Tensor query = along(q, dtype);
    Tensor out = allocate(sizes, dtype);
    with_type(dtype, [&](auto number) {
      WideAttention<decltype(number)>{query, key, value, added, factor, out}.run();
    });
    return out;
  }
  const Tensor query = along(q, read(q));
  Tensor out = allocate(sizes, query.scalar_type());
  with_type(k.scalar_type(), [&](auto number) {
    Attention<decltype(number)>{query, key, value, added, factor, out}.run();
  });
  return converted(std::move(out), dtype);
}

}  // namespace outrider
