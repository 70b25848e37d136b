// Weights that are checked once and multiplied many times.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "checks.h"
#include "ffn/ffn.h"

namespace moelight::bind {

// Experts of one layer: everything but their rows, tokens and threads; what it points to lives as long as this. An
// expert that was None has no weights.
struct BoundExperts {
  ExpertArgs args = {};
  virtual ~BoundExperts() = default;
};

// A linear layer: everything but tokens and threads, and what its weight and bias lie in.
struct BoundLinear {
  LinearArgs args = {};
  std::vector<In> arrays;
  std::unique_ptr<Quantized> quantized;
};

// `columns`: inputs, or below 0 as many as the weight has. `weight`: floats or a quantised matrix; `bias` may be None.
BoundLinear bind_linear(const char* name, nb::handle weight, const char* bias_name, nb::handle bias,
                        const std::string& activations, int64_t columns);

}  // namespace moelight::bind
