// Latent attention over the paged cache: arrays come in by DLPack, are checked here, and leave as plain structs. Knows
// no torch and no algorithm.

#include "mla/mla.h"

#include "paged.h"

namespace moelight::bind {
namespace {

using namespace nb::literals;

struct LatentCache {
  int64_t blocks, block_size, row_elements;
  DType dtype;
};

template <class Array>
LatentCache check_cache(const Array& cache) {
  check_layout("cache", cache, 3);
  const LatentCache result = {static_cast<int64_t>(cache.shape(0)), static_cast<int64_t>(cache.shape(1)),
                              static_cast<int64_t>(cache.shape(2)), float_type("cache", cache)};
  if (result.block_size < 1 || result.row_elements < 1) refuse("cache", "is empty: shape " + shape_of(cache));
  return result;
}

void check_queries(const In& latent, const In& rotary, const Out& out, const LatentCache& cache) {
  check_layout("q_nope_absorbed", latent, 3);
  check_float_type("q_nope_absorbed", latent, cache.dtype);
  check_layout("q_rope", rotary, 3);
  check_float_type("q_rope", rotary, cache.dtype);
  if (latent.shape(1) < 1 || latent.shape(2) < 1) refuse("q_nope_absorbed", "is empty: shape " + shape_of(latent));
  check_dim("q_rope", rotary, 0, static_cast<int64_t>(latent.shape(0)), "batch");
  check_dim("q_rope", rotary, 1, static_cast<int64_t>(latent.shape(1)), "heads");
  if (rotary.shape(2) < 1) refuse("q_rope", "is empty: shape " + shape_of(rotary));
  if (static_cast<int64_t>(latent.shape(2) + rotary.shape(2)) != cache.row_elements)
    refuse("cache", "its rows have " + std::to_string(cache.row_elements) + " elements, the queries " +
                        std::to_string(latent.shape(2)) + " + " + std::to_string(rotary.shape(2)));
  check_layout("out", out, 3);
  check_float_type("out", out, cache.dtype);
  for (size_t i = 0; i < 3; ++i) check_dim("out", out, i, static_cast<int64_t>(latent.shape(i)), "size");
}

void mla_decode(const In& latent, const In& rotary, const In& cache_rows, const In& block_tables, const In& seq_lens,
                double scale, const Out& out, int64_t threads) {
  const LatentCache cache = check_cache(cache_rows);
  check_queries(latent, rotary, out, cache);
  const auto batch = static_cast<int64_t>(latent.shape(0));
  const Tables tables = check_sequences(block_tables, seq_lens, batch);
  check_entries(tables, cache.blocks, cache.block_size, 0);
  const MlaArgs args = {.dtype = cache.dtype,
                        .batch = batch,
                        .heads = static_cast<int64_t>(latent.shape(1)),
                        .latent = static_cast<int64_t>(latent.shape(2)),
                        .rotary = static_cast<int64_t>(rotary.shape(2)),
                        .block_size = cache.block_size,
                        .q_latent = latent.data(),
                        .q_latent_stride = latent.stride(0),
                        .q_rotary = rotary.data(),
                        .q_rotary_stride = rotary.stride(0),
                        .cache = cache_rows.data(),
                        .cache_stride = cache_rows.stride(0),
                        .tables = tables.entries,
                        .table_stride = tables.stride,
                        .seq_lens = tables.seq_lens,
                        .scale = static_cast<float>(scale),
                        .out = out.data(),
                        .out_stride = out.stride(0),
                        .threads = checked_threads(threads)};
  nb::gil_scoped_release release;
  moelight::mla_decode(args);
}

void mla_append(const Out& cache_rows, const In& fresh, const In& slots, int64_t threads) {
  const LatentCache cache = check_cache(cache_rows);
  const int64_t tokens = check_slot_layout(slots);
  check_layout("new", fresh, 2);
  check_float_type("new", fresh, cache.dtype);
  check_dim("new", fresh, 0, tokens, "tokens");
  check_dim("new", fresh, 1, cache.row_elements, "row");
  const int64_t bytes = dtype_bytes(cache.dtype);
  const MlaAppendArgs args = {.row_bytes = cache.row_elements * bytes,
                              .tokens = tokens,
                              .block_size = cache.block_size,
                              .cache = cache_rows.data(),
                              .cache_stride_bytes = cache_rows.stride(0) * bytes,
                              .fresh = fresh.data(),
                              .fresh_stride_bytes = fresh.stride(0) * bytes,
                              .slots = check_slots(slots, cache.blocks, cache.block_size),
                              .threads = checked_threads(threads)};
  nb::gil_scoped_release release;
  moelight::mla_append(args);
}

}  // namespace

void add_mla(nb::module_& module) {
  module.def("mla_decode", mla_decode, "q_nope_absorbed"_a, "q_rope"_a, "cache"_a, "block_tables"_a, "seq_lens"_a,
             "scale"_a, "out"_a, "threads"_a);
  module.def("mla_append", mla_append, "cache"_a, "new"_a, "slots"_a, "threads"_a);
}

}  // namespace moelight::bind
