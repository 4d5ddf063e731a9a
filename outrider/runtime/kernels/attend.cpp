// Attention for forward passes over few tokens, on a CPU.

#include <c10/util/SmallVector.h>

#include "allocate.h"
#include "attend.h"
#include "attend_wide.h"
#include "kernels.h"

namespace outrider {

constexpr int64_t kTileQueries = 5;  // queries of a group from which the matrix unit attends faster

at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                  const at::Tensor& mask, double scale, int64_t widest) {
  auto along = [](const at::Tensor& x) { return x.stride(3) == 1 ? x : x.contiguous(); };
  const at::Tensor key = along(k), value = along(v);
  const at::Tensor bias = along(mask.expand({q.size(0), 1, q.size(2), k.size(2)}));
  const float factor = static_cast<float>(scale);
  const auto dtype = q.scalar_type();
  const bool same = dtype == k.scalar_type() && dtype == v.scalar_type();
  const int64_t queries = q.size(2) * (q.size(1) / k.size(1));
  const bool tiles = widest < kAnyNumber && dtype == at::kBFloat16 && queries >= kTileQueries &&
                     use_tiles(queries, q.size(3));
  const bool narrow = dtype == at::kBFloat16, narrow_mask = mask.scalar_type() == at::kBFloat16;
  const at::Tensor added = narrow_mask ? bias : bias.to(at::kFloat);
  const c10::SmallVector<int64_t, 4> sizes{q.size(0), q.size(2), q.size(1), v.size(3)};
  if (same && (q.size(2) > widest || tiles)) {
    const at::Tensor query = along(q);
    at::Tensor out = allocate(sizes, dtype);
    with_type(dtype, [&](auto number) {
      WideAttention<decltype(number)>{query, key, value, added, factor, out}.run();
    });
    return out;
  }
  const at::Tensor query = along(narrow ? q : q.to(at::kFloat));
  at::Tensor out = allocate(sizes, query.scalar_type());
  with_type(k.scalar_type(), [&](auto number) {
    Attention<decltype(number)>{query, key, value, added, factor, out}.run();
  });
  return out.to(dtype);
}

}  // namespace outrider
