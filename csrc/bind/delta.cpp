// The gated delta rule and its convolution: arrays are checked here and leave as plain structs. Does not depend on any
// algorithm.

#include "delta/delta.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "checks.h"

namespace moelight::bind {
namespace {

using namespace nb::literals;

// int32 [B + 1] that rises from 0 to `rows`.
int64_t check_starts(const In& starts, int64_t rows) {
  check_layout("starts", starts, 1);
  check_int_type<int32_t>("starts", starts);
  const auto count = static_cast<int64_t>(starts.shape(0));
  if (count < 1 || (count > 1 && starts.stride(0) != 1)) refuse("starts", "must be contiguous and not empty");
  const auto* const offsets = static_cast<const int32_t*>(starts.data());
  if (offsets[0] != 0 || offsets[count - 1] != rows || !std::is_sorted(offsets, offsets + count))
    refuse("starts", "must rise from 0 to " + std::to_string(rows));
  return count - 1;
}

// One array a sequence, of these sizes and without gaps; no two in the same place.
std::vector<void*> check_states(const std::vector<Out>& states, int64_t sequences, DType dtype,
                                const std::vector<int64_t>& sizes) {
  if (static_cast<int64_t>(states.size()) != sequences)
    refuse("states", "must be " + std::to_string(sequences) + ", one a sequence, are " + std::to_string(states.size()));
  std::vector<void*> places;
  for (const Out& state : states) {
    check_layout("states", state, sizes.size());
    if (float_type("states", state) != dtype) refuse("states", "have another dtype");
    int64_t row = 1;
    for (size_t dim = 0; dim < sizes.size(); ++dim) check_dim("states", state, dim, sizes[dim], "size");
    for (size_t dim = 1; dim < sizes.size(); ++dim) row *= sizes[dim];
    if (sizes[0] > 1 && state.stride(0) != row) refuse("states", "must be contiguous");
    places.push_back(state.data());
  }
  std::vector<void*> sorted = places;
  std::sort(sorted.begin(), sorted.end());
  if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end() && sizes[0] > 0)
    refuse("states", "two sequences have the same one");
  return places;
}

void causal_conv(const In& x, const In& weight, const std::optional<In>& bias, const std::vector<Out>& states,
                 const In& starts, bool silu, const Out& out, int64_t threads) {
  check_layout("x", x, 2);
  const DType dtype = float_type("x", x);
  const auto rows = static_cast<int64_t>(x.shape(0)), channels = static_cast<int64_t>(x.shape(1));
  check_layout("weight", weight, 2);
  if (float_type("weight", weight) != dtype) refuse("weight", "must have the dtype of x");
  check_dim("weight", weight, 0, channels, "channels");
  const auto taps = static_cast<int64_t>(weight.shape(1));
  if (taps < 1 || taps > kMaxTaps) refuse("weight", "must have 1 to 16 taps, shape is " + shape_of(weight));
  if (channels > 1 && weight.stride(0) != taps) refuse("weight", "must be contiguous");
  if (bias) {
    check_layout("bias", *bias, 1);
    if (float_type("bias", *bias) != dtype) refuse("bias", "must have the dtype of x");
    check_dim("bias", *bias, 0, channels, "channels");
    if (channels > 1 && bias->stride(0) != 1) refuse("bias", "must be contiguous");
  }
  check_layout("out", out, 2);
  if (float_type("out", out) != dtype) refuse("out", "must have the dtype of x");
  check_dim("out", out, 0, rows, "rows");
  check_dim("out", out, 1, channels, "channels");
  const int64_t sequences = check_starts(starts, rows);
  const std::vector<void*> places = check_states(states, sequences, dtype, {taps - 1, channels});
  const ConvArgs args = {.dtype = dtype,
                         .sequences = sequences,
                         .channels = channels,
                         .taps = taps,
                         .starts = static_cast<const int32_t*>(starts.data()),
                         .x = x.data(),
                         .x_stride = x.stride(0),
                         .weight = weight.data(),
                         .bias = bias ? bias->data() : nullptr,
                         .states = places.data(),
                         .silu = silu,
                         .out = out.data(),
                         .out_stride = out.stride(0),
                         .threads = checked_threads(threads)};
  nb::gil_scoped_release release;
  moelight::causal_conv(args);
}

// [T, heads, D] of a dtype.
void check_heads(const char* name, const In& array, DType dtype, int64_t rows) {
  check_layout(name, array, 3);
  if (float_type(name, array) != dtype) refuse(name, "must have the dtype of q");
  check_dim(name, array, 0, rows, "rows");
  if (array.shape(1) < 1 || array.shape(2) < 1) refuse(name, "is empty: shape " + shape_of(array));
}

void delta_rule(const In& q, const In& k, const In& v, const In& decay, const In& beta, const std::vector<Out>& states,
                const In& starts, const Out& out, int64_t threads) {
  check_layout("q", q, 3);
  const DType dtype = float_type("q", q);
  const auto rows = static_cast<int64_t>(q.shape(0));
  check_heads("q", q, dtype, rows);
  check_heads("k", k, dtype, rows);
  check_heads("v", v, dtype, rows);
  const auto key_heads = static_cast<int64_t>(q.shape(1)), key_dim = static_cast<int64_t>(q.shape(2));
  const auto heads = static_cast<int64_t>(v.shape(1)), value_dim = static_cast<int64_t>(v.shape(2));
  check_dim("k", k, 1, key_heads, "heads");
  check_dim("k", k, 2, key_dim, "size of a head");
  if (heads % key_heads) refuse("v", "its heads must be a multiple of those of q, shape is " + shape_of(v));
  check_layout("decay", decay, 3);
  check_layout("beta", beta, 2);
  if (float_type("decay", decay) != DType::kFloat32) refuse("decay", "must be float32");
  if (float_type("beta", beta) != DType::kFloat32) refuse("beta", "must be float32");
  check_dim("decay", decay, 0, rows, "rows");
  check_dim("decay", decay, 1, heads, "heads");
  const auto decays = static_cast<int64_t>(decay.shape(2));
  if (decays != 1) check_dim("decay", decay, 2, key_dim, "size of a head");
  check_dim("beta", beta, 0, rows, "rows");
  check_dim("beta", beta, 1, heads, "heads");
  check_layout("out", out, 3);
  if (float_type("out", out) != dtype) refuse("out", "must have the dtype of q");
  check_dim("out", out, 0, rows, "rows");
  check_dim("out", out, 1, heads, "heads");
  check_dim("out", out, 2, value_dim, "size of a head");
  const int64_t sequences = check_starts(starts, rows);
  const std::vector<void*> places = check_states(states, sequences, DType::kFloat32, {heads, key_dim, value_dim});
  std::vector<float*> floats;
  for (void* state : places) floats.push_back(static_cast<float*>(state));
  const DeltaArgs args = {.dtype = dtype,
                          .sequences = sequences,
                          .key_heads = key_heads,
                          .heads = heads,
                          .key_dim = key_dim,
                          .value_dim = value_dim,
                          .starts = static_cast<const int32_t*>(starts.data()),
                          .q = q.data(),
                          .k = k.data(),
                          .v = v.data(),
                          .q_stride = q.stride(0),
                          .k_stride = k.stride(0),
                          .v_stride = v.stride(0),
                          .decay = static_cast<const float*>(decay.data()),
                          .decay_stride = decay.stride(0),
                          .decays = decays,
                          .beta = static_cast<const float*>(beta.data()),
                          .beta_stride = beta.stride(0),
                          .states = floats.data(),
                          .out = out.data(),
                          .out_stride = out.stride(0),
                          .threads = checked_threads(threads)};
  nb::gil_scoped_release release;
  moelight::delta_rule(args);
}

}  // namespace

void add_delta(nb::module_& module) {
  module.def("causal_conv", causal_conv, "x"_a, "weight"_a, "bias"_a.none(), "states"_a, "starts"_a, "silu"_a, "out"_a,
             "threads"_a);
  module.def("delta_rule", delta_rule, "q"_a, "k"_a, "v"_a, "decay"_a, "beta"_a, "states"_a, "starts"_a, "out"_a,
             "threads"_a);
}

}  // namespace moelight::bind
