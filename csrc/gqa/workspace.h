// Memory that a driver lends to its kernels between calls. Does not depend on kernels.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace moelight {

constexpr int64_t kAlignedFloats = 16;

constexpr int64_t aligned(int64_t floats) { return (floats + kAlignedFloats - 1) / kAlignedFloats * kAlignedFloats; }

// Grows and never shrinks, one for each calling thread: a fresh mapping at every call would fault in page by page.
class Workspace {
 public:
  float* floats(int64_t count) {
    if (count > capacity_) {
      memory_.reset();
      capacity_ = 0;
      memory_.reset(static_cast<float*>(std::aligned_alloc(64, static_cast<size_t>(aligned(count)) * sizeof(float))));
      if (!memory_) throw std::bad_alloc();
      capacity_ = count;
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  std::unique_ptr<float, Free> memory_;
  int64_t capacity_ = 0;
};

}  // namespace moelight
