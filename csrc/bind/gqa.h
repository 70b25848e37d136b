// A paged cache that is checked once and attended to many times.
#pragma once

#include "gqa/gqa.h"
#include "paged.h"

namespace moelight::bind {

// The cache of one layer, and how its queries attend: everything but sequences, queries, new rows, output and threads.
// Keeps the arrays.
class BoundCache {
 public:
  BoundCache(const Out& k_cache, const Out& v_cache, double scale, int64_t window, double softcap,
             const MaybeOut& k_scale, const MaybeOut& v_scale);

  // With `batch` checked sequences. Of an int8 cache the dtype says nothing.
  GqaArgs of_sequences(const In& block_tables, const In& seq_lens, int64_t batch) const;

 private:
  GqaArgs args_;
  int64_t blocks_;
  Out k_cache_, v_cache_;
  MaybeOut k_scale_, v_scale_;
};

}  // namespace moelight::bind
