// Quantised matrices as they come from Python: (kind, bits, rows, columns, group, group_rows, zero_bias, codes, scales,
// zero points, order), where the last four are arrays or None. Their sizes are checked here.
#pragma once

#include <vector>

#include "checks.h"
#include "quantized/quantized.h"

namespace moelight::bind {

inline bool is_quantized(nb::handle item) { return nb::isinstance<nb::tuple>(item); }

// The matrix, whose arrays live as long as those in `arrays`.
Quantized to_quantized(const char* name, nb::handle item, std::vector<In>& arrays);

// Whether two matrices have one format and size.
bool alike(const Quantized& a, const Quantized& b);

}  // namespace moelight::bind
