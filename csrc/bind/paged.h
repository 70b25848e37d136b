// What the bindings over paged caches check alike: block tables and lengths.
#pragma once

#include <optional>

#include "checks.h"

namespace moelight::bind {

using MaybeIn = std::optional<In>;
using MaybeOut = std::optional<Out>;

struct Tables {
  const int32_t* entries;  // [B, max_blocks], rows `stride` apart
  int64_t stride;
  const int32_t* seq_lens;  // [B]
  int64_t batch, max_blocks;
};

inline Tables check_sequences(const In& block_tables, const In& seq_lens, int64_t batch) {
  check_layout("block_tables", block_tables, 2);
  check_int_type<int32_t>("block_tables", block_tables);
  check_dim("block_tables", block_tables, 0, batch, "batch");
  check_layout("seq_lens", seq_lens, 1);
  check_int_type<int32_t>("seq_lens", seq_lens);
  check_dim("seq_lens", seq_lens, 0, batch, "batch");
  if (batch > 1 && seq_lens.stride(0) != 1) refuse("seq_lens", "must be contiguous");
  return {static_cast<const int32_t*>(block_tables.data()), block_tables.stride(0),
          static_cast<const int32_t*>(seq_lens.data()), batch, static_cast<int64_t>(block_tables.shape(1))};
}

// The entries that are read: those from the window's first position (all, if `window` is 0) to the sequence's end.
inline void check_entries(const Tables& tables, int64_t blocks, int64_t block_size, int64_t window) {
  for (int64_t b = 0; b < tables.batch; ++b) {
    const int64_t length = tables.seq_lens[b];
    if (length < 0 || length > tables.max_blocks * block_size)
      refuse("seq_lens", "entry " + std::to_string(b) + " is " + std::to_string(length) +
                             ", the block table holds 0 to " + std::to_string(tables.max_blocks * block_size));
    const int64_t first = window > 0 ? std::max<int64_t>(0, length - window) / block_size : 0;
    for (int64_t i = first; i * block_size < length; ++i) {
      const int32_t block = tables.entries[b * tables.stride + i];
      if (block < 0 || block >= blocks)
        refuse("block_tables", "entry [" + std::to_string(b) + ", " + std::to_string(i) + "] is " +
                                   std::to_string(block) + ", the cache has " + std::to_string(blocks) + " blocks");
    }
  }
}

// Slots to write, all within a cache of blocks * block_size of them.
inline const int64_t* check_slots(const In& slots, int64_t blocks, int64_t block_size) {
  const auto* slot = static_cast<const int64_t*>(slots.data());
  for (int64_t t = 0; t < static_cast<int64_t>(slots.shape(0)); ++t)
    if (slot[t] < 0 || slot[t] >= blocks * block_size)
      refuse("slots", "entry " + std::to_string(t) + " is " + std::to_string(slot[t]) + ", the cache has " +
                          std::to_string(blocks * block_size) + " slots");
  return slot;
}

inline int64_t check_slot_layout(const In& slots) {
  check_layout("slots", slots, 1);
  check_int_type<int64_t>("slots", slots);
  if (slots.shape(0) > 1 && slots.stride(0) != 1) refuse("slots", "must be contiguous");
  return static_cast<int64_t>(slots.shape(0));
}

}  // namespace moelight::bind
