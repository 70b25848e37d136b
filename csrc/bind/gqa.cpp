// Attention over the paged cache: arrays come in by DLPack, are checked here, and leave as plain structs. Knows no
// torch and no algorithm.

#include "gqa/gqa.h"
#include "checks.h"

namespace moelight::bind {
namespace {

using namespace nb::literals;

struct Cache {
  int64_t blocks, kv_heads, block_size, head_dim;
  DType dtype;
};

template <class Array>
Cache check_caches(const Array& k_cache, const Array& v_cache) {
  check_layout("k_cache", k_cache, 4);
  check_layout("v_cache", v_cache, 4);
  const DType dtype = float_type("k_cache", k_cache);
  if (float_type("v_cache", v_cache) != dtype) refuse("v_cache", "must have the dtype of k_cache");
  for (size_t i = 0; i < 4; ++i)
    if (v_cache.shape(i) != k_cache.shape(i))
      refuse("v_cache", "has shape " + shape_of(v_cache) + ", k_cache has " + shape_of(k_cache));
  const Cache cache = {static_cast<int64_t>(k_cache.shape(0)), static_cast<int64_t>(k_cache.shape(1)),
                       static_cast<int64_t>(k_cache.shape(2)), static_cast<int64_t>(k_cache.shape(3)), dtype};
  if (cache.kv_heads < 1 || cache.block_size < 1) refuse("k_cache", "is empty: shape " + shape_of(k_cache));
  if (cache.head_dim < 8 || cache.head_dim > kMaxHeadDim || cache.head_dim % 8 != 0)
    refuse("k_cache", "head size must be a multiple of 8 from 8 to 256, shape is " + shape_of(k_cache));
  return cache;
}

void check_tables(const GqaArgs& args, int64_t blocks, int64_t max_blocks) {
  for (int64_t b = 0; b < args.batch; ++b) {
    const int64_t length = args.seq_lens[b];
    if (length < 0 || length > max_blocks * args.block_size)
      refuse("seq_lens", "entry " + std::to_string(b) + " is " + std::to_string(length) +
                             ", the block table holds 0 to " + std::to_string(max_blocks * args.block_size));
    const int64_t first = args.window > 0 ? std::max<int64_t>(0, length - args.window) / args.block_size : 0;
    for (int64_t i = first; i * args.block_size < length; ++i) {
      const int32_t block = args.tables[b * args.table_stride + i];
      if (block < 0 || block >= blocks)
        refuse("block_tables", "entry [" + std::to_string(b) + ", " + std::to_string(i) + "] is " +
                                   std::to_string(block) + ", the cache has " + std::to_string(blocks) + " blocks");
    }
  }
}

void gqa_decode(const In& q, const In& k_cache, const In& v_cache, const In& block_tables, const In& seq_lens,
                double scale, int64_t window, const Out& out, int64_t threads) {
  const Cache cache = check_caches(k_cache, v_cache);
  check_layout("q", q, 3);
  check_float_type("q", q, cache.dtype);
  check_dim("q", q, 2, cache.head_dim, "head size");
  const auto batch = static_cast<int64_t>(q.shape(0)), q_heads = static_cast<int64_t>(q.shape(1));
  if (q_heads < 1 || q_heads % cache.kv_heads != 0)
    refuse("q", "its " + std::to_string(q_heads) + " heads are no multiple of the cache's " +
                    std::to_string(cache.kv_heads));
  check_layout("out", out, 3);
  check_float_type("out", out, cache.dtype);
  for (size_t i = 0; i < 3; ++i) check_dim("out", out, i, static_cast<int64_t>(q.shape(i)), "size");
  check_layout("block_tables", block_tables, 2);
  check_int_type<int32_t>("block_tables", block_tables);
  check_dim("block_tables", block_tables, 0, batch, "batch");
  check_layout("seq_lens", seq_lens, 1);
  check_int_type<int32_t>("seq_lens", seq_lens);
  check_dim("seq_lens", seq_lens, 0, batch, "batch");
  if (batch > 1 && seq_lens.stride(0) != 1) refuse("seq_lens", "must be contiguous");
  if (window < 0) refuse("window", "must be positive, is " + std::to_string(window));

  const GqaArgs args = {.dtype = cache.dtype,
                        .batch = batch,
                        .q_heads = q_heads,
                        .kv_heads = cache.kv_heads,
                        .head_dim = cache.head_dim,
                        .block_size = cache.block_size,
                        .q = q.data(),
                        .q_stride = q.stride(0),
                        .k_cache = k_cache.data(),
                        .k_stride = k_cache.stride(0),
                        .v_cache = v_cache.data(),
                        .v_stride = v_cache.stride(0),
                        .tables = static_cast<const int32_t*>(block_tables.data()),
                        .table_stride = block_tables.stride(0),
                        .seq_lens = static_cast<const int32_t*>(seq_lens.data()),
                        .scale = static_cast<float>(scale),
                        .window = window,
                        .out = out.data(),
                        .out_stride = out.stride(0),
                        .threads = checked_threads(threads)};
  check_tables(args, cache.blocks, static_cast<int64_t>(block_tables.shape(1)));
  nb::gil_scoped_release release;
  moelight::gqa_decode(args);
}

void kv_append(const Out& k_cache, const Out& v_cache, const In& k_new, const In& v_new, const In& slots,
               int64_t threads) {
  const Cache cache = check_caches(k_cache, v_cache);
  check_layout("slots", slots, 1);
  check_int_type<int64_t>("slots", slots);
  const auto tokens = static_cast<int64_t>(slots.shape(0));
  if (tokens > 1 && slots.stride(0) != 1) refuse("slots", "must be contiguous");
  auto check_new = [&](const char* name, const In& array) {
    check_layout(name, array, 3);
    check_float_type(name, array, cache.dtype);
    check_dim(name, array, 0, tokens, "tokens");
    check_dim(name, array, 1, cache.kv_heads, "heads");
    check_dim(name, array, 2, cache.head_dim, "head size");
  };
  check_new("k_new", k_new);
  check_new("v_new", v_new);
  const auto* slot = static_cast<const int64_t*>(slots.data());
  for (int64_t t = 0; t < tokens; ++t)
    if (slot[t] < 0 || slot[t] >= cache.blocks * cache.block_size)
      refuse("slots", "entry " + std::to_string(t) + " is " + std::to_string(slot[t]) + ", the cache has " +
                          std::to_string(cache.blocks * cache.block_size) + " slots");

  const AppendArgs args = {.element_bytes = dtype_bytes(cache.dtype),
                           .tokens = tokens,
                           .kv_heads = cache.kv_heads,
                           .head_dim = cache.head_dim,
                           .block_size = cache.block_size,
                           .k_cache = k_cache.data(),
                           .k_stride = k_cache.stride(0),
                           .v_cache = v_cache.data(),
                           .v_stride = v_cache.stride(0),
                           .k_new = k_new.data(),
                           .k_new_stride = k_new.stride(0),
                           .v_new = v_new.data(),
                           .v_new_stride = v_new.stride(0),
                           .slots = slot,
                           .threads = checked_threads(threads)};
  nb::gil_scoped_release release;
  moelight::kv_append(args);
}

}  // namespace

void add_gqa(nb::module_& module) {
  module.def("gqa_decode", gqa_decode, "q"_a, "k_cache"_a, "v_cache"_a, "block_tables"_a, "seq_lens"_a, "scale"_a,
             "window"_a, "out"_a, "threads"_a);
  module.def("kv_append", kv_append, "k_cache"_a, "v_cache"_a, "k_new"_a, "v_new"_a, "slots"_a, "threads"_a);
}

}  // namespace moelight::bind
