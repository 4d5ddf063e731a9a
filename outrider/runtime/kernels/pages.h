// Memory in pages of two megabytes, where the system has them. A forward pass reads every weight
// once, and with small pages it would have to translate thousands of addresses.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace outrider {

// A tensor of so many bytes (uint8).
inline at::Tensor pages(int64_t bytes) {
  const auto options = at::TensorOptions().dtype(at::kByte);
#ifdef __linux__
  constexpr int64_t kPage = int64_t{1} << 21;
  const int64_t mapped = (bytes + kPage - 1) / kPage * kPage + kPage;
  void* base = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base != MAP_FAILED) {
    const auto first = (reinterpret_cast<uintptr_t>(base) + kPage - 1) / kPage * kPage;
    auto* start = reinterpret_cast<char*>(first);
    madvise(start, mapped - kPage, MADV_HUGEPAGE);  // only advice: if it is ignored, pages are small
    return at::from_blob(start, {bytes}, [base, mapped](void*) { munmap(base, mapped); }, options);
  }
#endif
  return at::empty({bytes}, options);
}

}  // namespace outrider
