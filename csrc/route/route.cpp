// The router: softmax over all experts, the k largest logits, their ids in ascending order.

#include "route.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "moelight/threads.h"

namespace moelight {
namespace {

constexpr int64_t kLanes = 8;  // partial sums of the softmax: an order that vector units can follow
constexpr int64_t kTokensPerTask = 16;

// e^x for x <= 0, relative error below 2e-7, zero where e^x is below the smallest normal number.
inline float exp_negative(float x) {
  constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23
  const float bounded = x < -87.0f ? -87.0f : x;
  const float integer = (bounded * 1.44269504f + kRounder) - kRounder;
  const float r = (bounded - integer * 0.693359375f) + integer * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  // Clamped before the conversion: what is not a number has no integer, and stays what it is through the product.
  const float power = integer > -127.0f ? integer : -127.0f;
  const float scale = std::bit_cast<float>((static_cast<int32_t>(power) + 127) << 23);
  const float y = (p * (r * r) + r + 1.0f) * scale;
  return x < -87.0f ? 0.0f : y;
}

struct Scratch {
  float* logits;  // [E], padded to a multiple of kLanes
  float* best;    // [k], descending
  int32_t* ids;   // [k]
};

float sum_of_exponentials(const float* logits, int64_t padded, float maximum) {
  float sum[kLanes] = {};
  for (int64_t e = 0; e < padded; e += kLanes)
    for (int64_t lane = 0; lane < kLanes; ++lane) sum[lane] += exp_negative(logits[e + lane] - maximum);
  return ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
}

// The k largest in descending order; ids come in ascending, so of equals the lowest is kept, and stands first.
void choose(const RouteArgs& args, const Scratch& scratch) {
  int64_t held = 0;
  for (int64_t e = 0; e < args.experts; ++e) {
    const float logit = scratch.logits[e];
    if (held == args.top_k && !(logit > scratch.best[held - 1])) continue;
    int64_t at = held < args.top_k ? held++ : held - 1;
    for (; at > 0 && logit > scratch.best[at - 1]; --at) {
      scratch.best[at] = scratch.best[at - 1];
      scratch.ids[at] = scratch.ids[at - 1];
    }
    scratch.best[at] = logit;
    scratch.ids[at] = static_cast<int32_t>(e);
  }
}

// Turns the chosen logits into weights.
void weigh(const RouteArgs& args, const Scratch& scratch, float maximum, float total) {
  float chosen = 0.0f;
  for (int64_t i = 0; i < args.top_k; ++i) {
    scratch.best[i] = exp_negative(scratch.best[i] - maximum) / total;
    chosen += scratch.best[i];
  }
  if (!args.normalize) return;
  for (int64_t i = 0; i < args.top_k; ++i) scratch.best[i] /= chosen;
}

template <class T>
void route_token(const RouteArgs& args, int64_t t, const Scratch& scratch) {
  const T* logits = static_cast<const T*>(args.logits) + t * args.stride;
  const int64_t padded = (args.experts + kLanes - 1) / kLanes * kLanes;
  float maximum = -std::numeric_limits<float>::infinity();
  for (int64_t e = 0; e < args.experts; ++e) {
    scratch.logits[e] = to_float(logits[e]);
    maximum = scratch.logits[e] > maximum ? scratch.logits[e] : maximum;
  }
  std::fill(scratch.logits + args.experts, scratch.logits + padded, std::numeric_limits<float>::lowest());
  const float total = sum_of_exponentials(scratch.logits, padded, maximum);
  if (std::isnan(total)) {  // a logit was not a number, or infinite
    for (int64_t i = 0; i < args.top_k; ++i) scratch.best[i] = total, scratch.ids[i] = static_cast<int32_t>(i);
  } else {
    choose(args, scratch);
    weigh(args, scratch, maximum, total);
  }
  float* weights = args.weights + t * args.top_k;
  int32_t* ids = args.ids + t * args.top_k;
  for (int64_t i = 0; i < args.top_k; ++i) {
    float weight = scratch.best[i];
    if (args.round) {
      T narrow;
      from_float(weight, narrow);
      weight = to_float(narrow);
    }
    int64_t at = i;
    for (; at > 0 && ids[at - 1] > scratch.ids[i]; --at) ids[at] = ids[at - 1], weights[at] = weights[at - 1];
    ids[at] = scratch.ids[i], weights[at] = weight;
  }
}

template <class T>
void route_all(const RouteArgs& args) {
  const int64_t tasks = (args.tokens + kTokensPerTask - 1) / kTokensPerTask;
  const auto threads = static_cast<int>(std::clamp<int64_t>(tasks, 1, args.threads));
  const int64_t floats = (args.experts + kLanes - 1) / kLanes * kLanes + args.top_k;
  std::vector<float> buffer(static_cast<size_t>(threads * floats));
  std::vector<int32_t> ids(static_cast<size_t>(threads * args.top_k));
  parallel_for(threads, tasks, [&](int64_t task, int worker) {
    float* floats_of_worker = buffer.data() + worker * floats;
    const Scratch scratch = {floats_of_worker, floats_of_worker + floats - args.top_k,
                             ids.data() + worker * args.top_k};
    const int64_t end = std::min(args.tokens, (task + 1) * kTokensPerTask);
    for (int64_t t = task * kTokensPerTask; t < end; ++t) route_token<T>(args, t, scratch);
  });
}

}  // namespace

void route(const RouteArgs& args) {
  switch (args.dtype) {
    case DType::kFloat32:
      return route_all<float>(args);
    case DType::kBFloat16:
      return route_all<Bf16>(args);
    case DType::kFloat16:
      return route_all<Fp16>(args);
  }
}

}  // namespace moelight
