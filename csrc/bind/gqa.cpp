// Attention over the paged cache: arrays come in by DLPack, are checked here, and leave as plain structs. Does not
// depend on torch or an algorithm.

#include <nanobind/stl/optional.h>

#include <algorithm>
#include <iterator>

#include "gqa.h"

namespace moelight::bind {
namespace {

using namespace nb::literals;

struct Cache {
  int64_t blocks, kv_heads, block_size, head_dim;
  bool int8;
  DType dtype;  // unless int8
};

template <class Array>
bool is_int8(const Array& array) {
  return array.dtype() == nb::dtype<int8_t>();
}

template <class Array>
Cache check_caches(const Array& k_cache, const Array& v_cache) {
  check_layout("k_cache", k_cache, 4);
  check_layout("v_cache", v_cache, 4);
  const bool int8 = is_int8(k_cache);
  const DType dtype = int8 ? DType::kFloat32 : float_type("k_cache", k_cache);
  if (is_int8(v_cache) != int8 || (!int8 && float_type("v_cache", v_cache) != dtype))
    refuse("v_cache", "must have the dtype of k_cache");
  for (size_t i = 0; i < 4; ++i)
    if (v_cache.shape(i) != k_cache.shape(i))
      refuse("v_cache", "has shape " + shape_of(v_cache) + ", k_cache has " + shape_of(k_cache));
  const Cache cache = {.blocks = static_cast<int64_t>(k_cache.shape(0)),
                       .kv_heads = static_cast<int64_t>(k_cache.shape(1)),
                       .block_size = static_cast<int64_t>(k_cache.shape(2)),
                       .head_dim = static_cast<int64_t>(k_cache.shape(3)),
                       .int8 = int8,
                       .dtype = dtype};
  if (cache.kv_heads < 1) refuse("k_cache", "is empty: shape " + shape_of(k_cache));
  if (std::find(std::begin(kBlockSizes), std::end(kBlockSizes), cache.block_size) == std::end(kBlockSizes))
    refuse("k_cache", "block size must be 16, 32, 64 or 128, shape is " + shape_of(k_cache));
  if (cache.head_dim < 8 || cache.head_dim > kMaxHeadDim || cache.head_dim % 8 != 0)
    refuse("k_cache", "head size must be a multiple of 8 from 8 to 512, shape is " + shape_of(k_cache));
  return cache;
}

template <class Array>
void check_float32(const char* name, const Array& array) {
  if (array.dtype() != nb::dtype<float>()) refuse(name, "must be float32");
}

// The scales of one cache; null, and none allowed, unless it is int8.
template <class Array>
float* check_scales(const char* name, const std::optional<Array>& scales, const Cache& cache, int64_t& stride) {
  stride = 0;
  if (scales.has_value() != cache.int8) refuse(name, cache.int8 ? "int8 caches need it" : "only int8 caches have it");
  if (!scales.has_value()) return nullptr;
  check_layout(name, *scales, 3);
  check_float32(name, *scales);
  check_dim(name, *scales, 0, cache.blocks, "blocks");
  check_dim(name, *scales, 1, cache.kv_heads, "heads");
  check_dim(name, *scales, 2, cache.block_size, "block size");
  stride = scales->stride(0);
  return const_cast<float*>(static_cast<const float*>(scales->data()));
}

void check_new(const char* name, const In& array, const Cache& cache, int64_t tokens, DType dtype) {
  check_layout(name, array, 3);
  if (float_type(name, array) != dtype)
    refuse(name, cache.int8 ? "must have one float dtype throughout" : "must have the same dtype as the cache");
  check_dim(name, array, 0, tokens, "tokens");
  check_dim(name, array, 1, cache.kv_heads, "heads");
  check_dim(name, array, 2, cache.head_dim, "head size");
}

void check_queries(const In& q, const Out& out, const Cache& cache) {
  check_layout("q", q, 3);
  const DType dtype = float_type("q", q);
  if (!cache.int8 && dtype != cache.dtype) refuse("q", "must have the same dtype as the cache");
  check_dim("q", q, 2, cache.head_dim, "head size");
  const auto q_heads = static_cast<int64_t>(q.shape(1));
  if (q_heads < 1 || q_heads % cache.kv_heads != 0)
    refuse("q", "its " + std::to_string(q_heads) + " heads are no multiple of the cache's " +
                    std::to_string(cache.kv_heads));
  check_layout("out", out, 3);
  if (float_type("out", out) != dtype) refuse("out", "must have the dtype of q");
  for (size_t i = 0; i < 3; ++i) check_dim("out", out, i, static_cast<int64_t>(q.shape(i)), "size");
}

const float* check_sinks(const MaybeIn& sinks, int64_t q_heads) {
  if (!sinks.has_value()) return nullptr;
  check_layout("sinks", *sinks, 1);
  check_float32("sinks", *sinks);
  check_dim("sinks", *sinks, 0, q_heads, "heads");
  if (q_heads > 1 && sinks->stride(0) != 1) refuse("sinks", "must be contiguous");
  return static_cast<const float*>(sinks->data());
}

// What decode attention needs of a cache; of an int8 one the dtype is that of its queries.
template <class Array>
GqaArgs decode_args(const Cache& cache, const Array& k_cache, const Array& v_cache, const std::optional<Array>& k_scale,
                    const std::optional<Array>& v_scale, double scale, int64_t window, double softcap) {
  if (window < 0) refuse("window", "must be positive, is " + std::to_string(window));
  GqaArgs args = {};
  args.dtype = cache.dtype, args.int8 = cache.int8, args.kv_heads = cache.kv_heads;
  args.head_dim = cache.head_dim, args.block_size = cache.block_size;
  args.k_cache = k_cache.data(), args.k_stride = k_cache.stride(0);
  args.v_cache = v_cache.data(), args.v_stride = v_cache.stride(0);
  args.k_scale = check_scales("k_scale", k_scale, cache, args.k_scale_stride);
  args.v_scale = check_scales("v_scale", v_scale, cache, args.v_scale_stride);
  args.scale = static_cast<float>(scale), args.softcap = static_cast<float>(softcap), args.window = window;
  return args;
}

void put_sequences(GqaArgs& args, const Tables& tables) {
  args.batch = tables.batch, args.tables = tables.entries, args.table_stride = tables.stride;
  args.seq_lens = tables.seq_lens;
}

// Neither, or both, of the rows that decode attention writes first.
void put_new(GqaArgs& args, const MaybeIn& k_new, const MaybeIn& v_new, const Cache& cache) {
  if (k_new.has_value() && !v_new.has_value()) refuse("v_new", "must come with k_new");
  if (v_new.has_value() && !k_new.has_value()) refuse("k_new", "must come with v_new");
  if (!k_new.has_value()) return;
  check_new("k_new", *k_new, cache, args.batch, args.dtype);
  check_new("v_new", *v_new, cache, args.batch, args.dtype);
  args.k_new = k_new->data(), args.k_new_stride = k_new->stride(0);
  args.v_new = v_new->data(), args.v_new_stride = v_new->stride(0);
}

void gqa_decode(const In& q, const In& k_cache, const In& v_cache, const In& block_tables, const In& seq_lens,
                double scale, int64_t window, const MaybeIn& sinks, double softcap, const MaybeIn& k_scale,
                const MaybeIn& v_scale, const MaybeIn& k_new, const MaybeIn& v_new, const Out& out, int64_t threads) {
  const Cache cache = check_caches(k_cache, v_cache);
  check_queries(q, out, cache);
  const Tables tables = check_sequences(block_tables, seq_lens, static_cast<int64_t>(q.shape(0)));
  GqaArgs args = decode_args(cache, k_cache, v_cache, k_scale, v_scale, scale, window, softcap);
  args.dtype = float_type("q", q), args.q_heads = static_cast<int64_t>(q.shape(1));
  args.q = q.data(), args.q_stride = q.stride(0);
  args.out = out.data(), args.out_stride = out.stride(0);
  args.sinks = check_sinks(sinks, args.q_heads);
  args.threads = checked_threads(threads);
  put_sequences(args, tables);
  put_new(args, k_new, v_new, cache);
  check_entries(tables, cache.blocks, cache.block_size, window);
  nb::gil_scoped_release release;
  moelight::gqa_decode(args);
}

void kv_append(const Out& k_cache, const Out& v_cache, const In& k_new, const In& v_new, const In& slots,
               const MaybeOut& k_scale, const MaybeOut& v_scale, int64_t threads) {
  const Cache cache = check_caches(k_cache, v_cache);
  const int64_t tokens = check_slot_layout(slots);
  const DType dtype = cache.int8 ? float_type("k_new", k_new) : cache.dtype;
  check_new("k_new", k_new, cache, tokens, dtype);
  check_new("v_new", v_new, cache, tokens, dtype);
  AppendArgs args = {};
  args.dtype = dtype, args.int8 = cache.int8;
  args.tokens = tokens, args.kv_heads = cache.kv_heads;
  args.head_dim = cache.head_dim, args.block_size = cache.block_size;
  args.k_cache = k_cache.data(), args.k_stride = k_cache.stride(0);
  args.v_cache = v_cache.data(), args.v_stride = v_cache.stride(0);
  args.k_new = k_new.data(), args.k_new_stride = k_new.stride(0);
  args.v_new = v_new.data(), args.v_new_stride = v_new.stride(0);
  args.k_scale = check_scales("k_scale", k_scale, cache, args.k_scale_stride);
  args.v_scale = check_scales("v_scale", v_scale, cache, args.v_scale_stride);
  args.slots = check_slots(slots, cache.blocks, cache.block_size);
  args.threads = checked_threads(threads);
  nb::gil_scoped_release release;
  moelight::kv_append(args);
}

}  // namespace

BoundCache::BoundCache(const Out& k_cache, const Out& v_cache, double scale, int64_t window, double softcap,
                       const MaybeOut& k_scale, const MaybeOut& v_scale)
    : k_cache_(k_cache), v_cache_(v_cache), k_scale_(k_scale), v_scale_(v_scale) {
  const Cache cache = check_caches(k_cache, v_cache);
  args_ = decode_args(cache, k_cache, v_cache, k_scale, v_scale, scale, window, softcap);
  blocks_ = cache.blocks;
}

GqaArgs BoundCache::of_sequences(const In& block_tables, const In& seq_lens, int64_t batch) const {
  const Tables tables = check_sequences(block_tables, seq_lens, batch);
  check_entries(tables, blocks_, args_.block_size, args_.window);
  GqaArgs args = args_;
  put_sequences(args, tables);
  return args;
}

void add_gqa(nb::module_& module) {
  nb::class_<BoundCache>(module, "PagedCache")
      .def(nb::init<const Out&, const Out&, double, int64_t, double, const MaybeOut&, const MaybeOut&>(), "k_cache"_a,
           "v_cache"_a, "scale"_a, "window"_a, "softcap"_a, "k_scale"_a.none(), "v_scale"_a.none());
  module.def("gqa_decode", gqa_decode, "q"_a, "k_cache"_a, "v_cache"_a, "block_tables"_a, "seq_lens"_a, "scale"_a,
             "window"_a, "sinks"_a.none(), "softcap"_a, "k_scale"_a.none(), "v_scale"_a.none(), "k_new"_a.none(),
             "v_new"_a.none(), "out"_a, "threads"_a);
  module.def("kv_append", kv_append, "k_cache"_a, "v_cache"_a, "k_new"_a, "v_new"_a, "slots"_a, "k_scale"_a.none(),
             "v_scale"_a.none(), "threads"_a);
}

}  // namespace moelight::bind
