// Memory for what is computed on the way.

#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace outrider {

// So many numbers, which are not set, from an address that is a multiple of a cache line.
template <typename T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t count) {
    constexpr size_t kLine = 64;
    const size_t bytes = (count * sizeof(T) + kLine - 1) / kLine * kLine;
    memory_.reset(static_cast<T*>(std::aligned_alloc(kLine, bytes)));
    if (!memory_ && bytes) throw std::bad_alloc();
  }
  T* data() const { return memory_.get(); }

 private:
  struct Free {
    void operator()(T* memory) const { std::free(memory); }
  };
  std::unique_ptr<T[], Free> memory_;
};

}  // namespace outrider
