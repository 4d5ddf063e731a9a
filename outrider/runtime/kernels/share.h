// Work shared dynamically among threads: where other processes use the cores, one thread may be
// half as fast as another.

#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>

namespace outrider {

constexpr int64_t kGrain = 1 << 16;  // multiplications that justify another thread

// Calls act(begin, end) for all `count` units, `part` of them at a time; each costs `cost`
// multiplications.
template <typename F>
void share(int64_t count, int64_t part, int64_t cost, const F& act) {
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), count * cost / kGrain);
  if (threads <= 1 || at::in_parallel_region()) return act(0, count);
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t begin; (begin = next.fetch_add(part)) < count;)
      act(begin, std::min(count, begin + part));
  });
}

}  // namespace outrider
