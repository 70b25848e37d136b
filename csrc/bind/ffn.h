// Weights that are checked once and multiplied many times.
#pragma once

#include <optional>

#include "checks.h"
#include "ffn/ffn.h"

namespace moelight::bind {

// Experts of one layer: everything but their rows, tokens and threads; what it points to lives as long as this. An
// expert that was None has no weights.
struct BoundExperts {
  ExpertArgs args = {};
  virtual ~BoundExperts() = default;
};

// A linear layer of floats with `columns` inputs: everything but tokens and threads. Whoever calls keeps the arrays.
LinearArgs bind_linear(const char* name, const In& weight, const char* bias_name, const std::optional<In>& bias,
                       int64_t columns);

}  // namespace moelight::bind
