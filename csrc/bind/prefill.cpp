// Attention of packed prompts: arrays come in by DLPack, are checked here, and leave as a plain struct. Does not depend
// on any torch and no algorithm.

#include "prefill/prefill.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <string>

#include "checks.h"

namespace moelight::bind {
namespace {

using namespace nb::literals;

using MaybeIn = std::optional<In>;

const int32_t* check_ints(const char* name, const In& array, int64_t count) {
  check_layout(name, array, 1);
  check_int_type<int32_t>(name, array);
  check_dim(name, array, 0, count, "length");
  if (count > 1 && array.stride(0) != 1) refuse(name, "must be contiguous");
  return static_cast<const int32_t*>(array.data());
}

template <class Array>
void check_heads(const char* name, const Array& array, DType dtype, int64_t tokens, int64_t heads, int64_t head_dim) {
  check_layout(name, array, 3);
  if (float_type(name, array) != dtype) refuse(name, "must have the dtype of q");
  check_dim(name, array, 0, tokens, "tokens");
  check_dim(name, array, 1, heads, "heads");
  check_dim(name, array, 2, head_dim, "head size");
}

void check_prompts(PrefillArgs& args, const In& q, const In& k, const In& v, const In& bounds, const Out& out) {
  check_layout("q", q, 3);
  args.dtype = float_type("q", q);
  const auto tokens = static_cast<int64_t>(q.shape(0));
  args.q_heads = static_cast<int64_t>(q.shape(1)), args.head_dim = static_cast<int64_t>(q.shape(2));
  if (args.head_dim < 8 || args.head_dim > kMaxPrefillHeadDim || args.head_dim % 8 != 0)
    refuse("q", "head size must be a multiple of 8 from 8 to 512, shape is " + shape_of(q));
  check_layout("k", k, 3);
  args.kv_heads = static_cast<int64_t>(k.shape(1));
  if (args.kv_heads < 1) refuse("k", "has no heads: shape " + shape_of(k));
  if (args.q_heads < 1 || args.q_heads % args.kv_heads != 0)
    refuse("q",
           "its " + std::to_string(args.q_heads) + " heads are no multiple of k's " + std::to_string(args.kv_heads));
  check_heads("k", k, args.dtype, tokens, args.kv_heads, args.head_dim);
  check_heads("v", v, args.dtype, tokens, args.kv_heads, args.head_dim);
  check_heads("out", out, args.dtype, tokens, args.q_heads, args.head_dim);
  check_layout("cu_seqlens", bounds, 1);
  args.sequences = static_cast<int64_t>(bounds.shape(0)) - 1;
  if (args.sequences < 0) refuse("cu_seqlens", "is empty");
  args.bounds = check_ints("cu_seqlens", bounds, args.sequences + 1);
  for (int64_t s = 0; s <= args.sequences; ++s)
    if (args.bounds[s] < (s == 0 ? 0 : args.bounds[s - 1]))
      refuse("cu_seqlens", "entry " + std::to_string(s) + " is " + std::to_string(args.bounds[s]) + ", out of order");
  if (args.bounds[0] != 0 || args.bounds[args.sequences] != tokens)
    refuse("cu_seqlens", "must run from 0 to the " + std::to_string(tokens) + " tokens of q");
  args.q = q.data(), args.q_stride = q.stride(0);
  args.k = k.data(), args.k_stride = k.stride(0);
  args.v = v.data(), args.v_stride = v.stride(0);
  args.out = out.data(), args.out_stride = out.stride(0);
}

template <class Array>
void check_cache(const char* name, const Array& cache, const PrefillArgs& args, bool scaled) {
  check_layout(name, cache, 4);
  if (scaled) {
    if (cache.dtype() != nb::dtype<int8_t>()) refuse(name, "must be int8, as there are scales");
  } else if (float_type(name, cache) != args.dtype) {
    refuse(name, "must have the dtype of q");
  }
  check_dim(name, cache, 1, args.kv_heads, "heads");
  check_dim(name, cache, 3, args.head_dim, "head size");
  if (cache.shape(2) < 1) refuse(name, "is empty: shape " + shape_of(cache));
}

const float* check_scale(const char* name, const In& scale, const In& cache) {
  check_layout(name, scale, 3);
  if (scale.dtype() != nb::dtype<float>()) refuse(name, "must be float32");
  for (size_t i = 0; i < 3; ++i) check_dim(name, scale, i, static_cast<int64_t>(cache.shape(i)), "size");
  return static_cast<const float*>(scale.data());
}

void check_context(PrefillArgs& args, const In& k_cache, const In& v_cache, const In& tables, const In& lens,
                   const MaybeIn& k_scale, const MaybeIn& v_scale) {
  check_cache("k_cache", k_cache, args, k_scale.has_value());
  check_cache("v_cache", v_cache, args, k_scale.has_value());
  check_dim("v_cache", v_cache, 0, static_cast<int64_t>(k_cache.shape(0)), "blocks");
  check_dim("v_cache", v_cache, 2, static_cast<int64_t>(k_cache.shape(2)), "block size");
  args.block_size = static_cast<int64_t>(k_cache.shape(2));
  args.k_cache = k_cache.data(), args.k_cache_stride = k_cache.stride(0);
  args.v_cache = v_cache.data(), args.v_cache_stride = v_cache.stride(0);
  if (k_scale && v_scale) {
    args.k_scale = check_scale("k_scale", *k_scale, k_cache), args.k_scale_stride = k_scale->stride(0);
    args.v_scale = check_scale("v_scale", *v_scale, v_cache), args.v_scale_stride = v_scale->stride(0);
  }
  check_layout("block_tables", tables, 2);
  check_int_type<int32_t>("block_tables", tables);
  check_dim("block_tables", tables, 0, args.sequences, "sequences");
  args.tables = static_cast<const int32_t*>(tables.data()), args.table_stride = tables.stride(0);
  args.context = check_ints("context_lens", lens, args.sequences);
  const auto blocks = static_cast<int64_t>(k_cache.shape(0));
  const int64_t capacity = static_cast<int64_t>(tables.shape(1)) * args.block_size;
  for (int64_t s = 0; s < args.sequences; ++s) {
    const int64_t length = args.context[s];
    if (length < 0 || length > capacity)
      refuse("context_lens", "entry " + std::to_string(s) + " is " + std::to_string(length) +
                                 ", the block table holds 0 to " + std::to_string(capacity));
    if (args.bounds[s] == args.bounds[s + 1]) continue;
    const int64_t first = args.window > 0 && length >= args.window ? length - args.window + 1 : 0;
    for (int64_t i = first / args.block_size; i * args.block_size < length; ++i) {
      const int32_t block = args.tables[s * args.table_stride + i];
      if (block < 0 || block >= blocks)
        refuse("block_tables", "entry [" + std::to_string(s) + ", " + std::to_string(i) + "] is " +
                                   std::to_string(block) + ", the cache has " + std::to_string(blocks) + " blocks");
    }
  }
}

void prefill_attention(const In& q, const In& k, const In& v, const In& cu_seqlens, double scale, int64_t window,
                       const MaybeIn& sinks, double softcap, const MaybeIn& k_cache, const MaybeIn& v_cache,
                       const MaybeIn& block_tables, const MaybeIn& context_lens, const MaybeIn& k_scale,
                       const MaybeIn& v_scale, const Out& out, int64_t threads) {
  PrefillArgs args = {};
  check_prompts(args, q, k, v, cu_seqlens, out);
  if (window < 0) refuse("window", "must be positive, is " + std::to_string(window));
  if (!(softcap >= 0)) refuse("softcap", "must be positive");
  args.scale = static_cast<float>(scale), args.window = window, args.softcap = static_cast<float>(softcap);
  args.threads = checked_threads(threads);
  if (sinks) {
    check_layout("sinks", *sinks, 1);
    if (float_type("sinks", *sinks) != DType::kFloat32) refuse("sinks", "must be float32");
    check_dim("sinks", *sinks, 0, args.q_heads, "heads");
    if (args.q_heads > 1 && sinks->stride(0) != 1) refuse("sinks", "must be contiguous");
    args.sinks = static_cast<const float*>(sinks->data());
  }
  if (k_scale.has_value() != v_scale.has_value()) refuse("v_scale", "must come with k_scale, or not at all");
  if (k_cache && v_cache && block_tables && context_lens)
    check_context(args, *k_cache, *v_cache, *block_tables, *context_lens, k_scale, v_scale);
  nb::gil_scoped_release release;
  moelight::prefill(args);
}

}  // namespace

void add_prefill(nb::module_& module) {
  module.def("prefill_attention", prefill_attention, "q"_a, "k"_a, "v"_a, "cu_seqlens"_a, "scale"_a, "window"_a,
             "sinks"_a.none(), "softcap"_a, "k_cache"_a.none(), "v_cache"_a.none(), "block_tables"_a.none(),
             "context_lens"_a.none(), "k_scale"_a.none(), "v_scale"_a.none(), "out"_a, "threads"_a);
}

}  // namespace moelight::bind
