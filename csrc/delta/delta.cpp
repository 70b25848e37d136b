// Sequences and their heads, or channels, shared out over threads. Does not depend on any instruction set.

#include "delta.h"

#include <algorithm>

#include "moelight/cpu.h"
#include "moelight/threads.h"
#include "moelight/workspace.h"

namespace moelight {
namespace {

const DeltaKernels& active_kernels() { return MOELIGHT_ACTIVE(delta)(); }

// Below so many numbers of states, or of convolved rows, a second thread costs more than it brings.
constexpr int64_t kStatesPerThread = int64_t{1} << 17;
constexpr int64_t kRowsPerThread = int64_t{1} << 15;

int useful_threads(int threads, int64_t values, int64_t per_thread) {
  return static_cast<int>(std::clamp<int64_t>(values / per_thread, 1, threads));
}

float* floats(int64_t count) {
  thread_local Workspace workspace;
  return reinterpret_cast<float*>(workspace.bytes(count * static_cast<int64_t>(sizeof(float))));
}

template <class T>
void widen_taps(const ConvArgs& args, float* weights, float* bias) {
  const T *const from = static_cast<const T*>(args.weight), *const added = static_cast<const T*>(args.bias);
  for (int64_t c = 0; c < args.channels; ++c) {
    for (int64_t j = 0; j < args.taps; ++j) weights[j * args.channels + c] = to_float(from[c * args.taps + j]);
    bias[c] = added == nullptr ? 0.0f : to_float(added[c]);
  }
}

}  // namespace

void causal_conv(const ConvArgs& args) {
  const int64_t blocks = (args.channels + kConvChannels - 1) / kConvChannels, scratch = conv_scratch(args.taps);
  float* const weights = floats((args.taps + 1) * args.channels + args.threads * scratch);
  float *const bias = weights + args.taps * args.channels, *const apart = bias + args.channels;
  switch (args.dtype) {
    case DType::kFloat32:
      widen_taps<float>(args, weights, bias);
      break;
    case DType::kBFloat16:
      widen_taps<Bf16>(args, weights, bias);
      break;
    case DType::kFloat16:
      widen_taps<Fp16>(args, weights, bias);
      break;
  }
  const auto conv = active_kernels().conv[static_cast<int>(args.dtype)];
  const int64_t values = args.starts[args.sequences] * args.channels;
  parallel_for(useful_threads(args.threads, values, kRowsPerThread), args.sequences * blocks,
               [&](int64_t task, int worker) {
                 const int64_t first = task % blocks * kConvChannels;
                 conv(args, weights, bias, task / blocks, first, std::min(kConvChannels, args.channels - first),
                      apart + worker * scratch);
               });
}

void delta_rule(const DeltaArgs& args) {
  const int64_t scratch = delta_scratch(args);
  float* const apart = floats(args.threads * scratch);
  const auto rule = active_kernels().rule[static_cast<int>(args.dtype)];
  const int64_t values = args.starts[args.sequences] * args.heads * args.key_dim * args.value_dim;
  parallel_for(
      useful_threads(args.threads, values, kStatesPerThread), args.sequences * args.heads,
      [&](int64_t task, int worker) { rule(args, task / args.heads, task % args.heads, apart + worker * scratch); });
}

}  // namespace moelight
