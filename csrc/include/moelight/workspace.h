// Memory that a kernel works in. Does not depend on kernels.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace moelight {

// Grows and never shrinks, one for each calling thread: a fresh mapping at every call would fault in page by page.
class Workspace {
 public:
  static constexpr int64_t kAlignment = 64;

  static constexpr int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

  // What it held is lost. Throws std::bad_alloc.
  char* bytes(int64_t count) {
    if (count > capacity_) {
      memory_.reset();
      capacity_ = 0;
      memory_.reset(static_cast<char*>(std::aligned_alloc(kAlignment, static_cast<size_t>(aligned(count)))));
      if (!memory_) throw std::bad_alloc();
      capacity_ = count;
    }
    return memory_.get();
  }

  // As `bytes`.
  float* floats(int64_t count) { return reinterpret_cast<float*>(bytes(count * static_cast<int64_t>(sizeof(float)))); }

  // As many floats as take whole lines of `kAlignment`.
  static constexpr int64_t aligned_floats(int64_t floats) {
    return aligned(floats * static_cast<int64_t>(sizeof(float))) / static_cast<int64_t>(sizeof(float));
  }

  int64_t capacity() const { return capacity_; }

 private:
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  std::unique_ptr<char, Free> memory_;
  int64_t capacity_ = 0;
};

}  // namespace moelight
