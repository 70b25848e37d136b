// Tables as they come from Python: (cells, lines, width, awq_order, bits, bias), whose memory is an array of their
// size.
#pragma once

#include "checks.h"
#include "repack/repack.h"

namespace moelight::bind {

// The table `item` in the memory of `dest`, which can be turned in `buffer_bytes`.
Table to_table(const char* name, nb::handle item, const Out& dest, int64_t buffer_bytes);

}  // namespace moelight::bind
