// The one algorithm of products with weights, over lanes L (lanes.h). Included once by each instruction set's file; all
// of it has internal linkage.
//
// Weights and activations both have K contiguous, so the lanes run along K and nothing is packed: a register tile of
// kRowTile rows times some tokens is summed over a block of K and reduced across the lanes at its end. Weights of
// another type than the lanes' are converted tile by tile into the first-level cache, and every token of the block
// meets them there; weights of the same type are read where they lie. Whoever reads a tile from memory fetches the
// next.

#include <algorithm>
#include <type_traits>

#include "ffn.h"
#include "finish.h"
#include "lanes.h"
#if defined(__AVX2__) && !defined(__AVX512F__)
#include "quantized/sums_avx2.h"
#elif defined(__AVX2__)
#include "quantized/floats_avx2.h"
#else
#include "quantized/floats.h"
#endif
#include "transposed.inl"

namespace moelight {
namespace {

// Bytes of a row that lie in one block of K, as the lanes multiply them.
constexpr int64_t kBlockBytes = 4096;
constexpr int64_t kRowTile = 4;

template <class L>
constexpr int64_t kBlock = kBlockBytes / static_cast<int64_t>(sizeof(typename L::Element));

// kRowTile rows of one block of K, as elements.
template <class L>
struct FloatRows {
  const typename L::Element* row[kRowTile];
  int64_t count;  // elements of a row, a multiple of the step
  int64_t lead;   // bytes from what is read to what is fetched
};

inline void fetch(const void* p, int64_t lead) { __builtin_prefetch(static_cast<const char*>(p) + lead, 0, 2); }

// Adds across the lanes, always in the same tree.
template <class L, int kTokens>
inline void add_sums(const typename L::V (&sum)[kRowTile][kTokens], float* sums) {
#pragma GCC unroll 8
  for (int c = 0; c < kTokens; ++c) {
    float four[kRowTile];
    L::Simd::sum4(sum[0][c], sum[1][c], sum[2][c], sum[3][c], four);
    for (int r = 0; r < kRowTile; ++r) sums[c * kUnitRows + r] += four[r];
  }
}

// sums[c][0..kRowTile) += x[c] . row[0..kRowTile); fetches what lies ahead of kFetch rows from `fetched` on.
template <class L, int kTokens, int kFetch>
void tile(const FloatRows<L>& rows, int64_t fetched, const typename L::Element* x, int64_t x_stride, float* sums) {
  using S = typename L::Simd;
  const typename L::Element* ahead[kRowTile];
#pragma GCC unroll 4
  for (int r = 0; r < kFetch; ++r) ahead[r] = rows.row[fetched + r];
  typename L::V sum[kRowTile][kTokens];
#pragma GCC unroll 4
  for (int r = 0; r < kRowTile; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < kTokens; ++c) sum[r][c] = S::zero();
  for (int64_t k = 0; k < rows.count; k += L::kStep) {
    typename L::Operand token[kTokens];
#pragma GCC unroll 8
    for (int c = 0; c < kTokens; ++c) token[c] = L::load(x + c * x_stride + k);
#pragma GCC unroll 4
    for (int r = 0; r < kRowTile; ++r) {
      if (r < kFetch) fetch(ahead[r] + k, rows.lead);
      const auto weight = L::load(rows.row[r] + k);
#pragma GCC unroll 8
      for (int c = 0; c < kTokens; ++c) sum[r][c] = L::madd(sum[r][c], weight, token[c]);
    }
  }
  add_sums<L, kTokens>(sum, sums);
}

template <class L, int kFetch, int kTokens = L::kTokens>
void tile_of(int64_t tokens, const FloatRows<L>& rows, int64_t fetched, const typename L::Element* x, int64_t x_stride,
             float* sums) {
  if (tokens == kTokens) {
    tile<L, kTokens, kFetch>(rows, fetched, x, x_stride, sums);
  } else if constexpr (kTokens > 1) {
    tile_of<L, kFetch, kTokens - 1>(tokens, rows, fetched, x, x_stride, sums);
  }
}

// All tokens in tiles of nearly equal size. When the rows are read where they lie, the first tiles fetch the rows after
// them, each its share, so that memory is asked for at an even pace.
template <class L>
__attribute__((noinline)) void all_tokens(const FloatRows<L>& rows, bool in_place, int64_t tokens,
                                          const typename L::Element* x, int64_t x_stride, float* sums) {
  const int64_t tiles = (tokens + L::kTokens - 1) / L::kTokens;
  const int64_t shares = !in_place || rows.lead == 0 ? 0 : tiles < kRowTile ? tiles : kRowTile;
  for (int64_t i = 0, begin = 0; i < tiles; ++i) {
    const int64_t end = tokens * (i + 1) / tiles, count = end - begin;
    const int64_t first = i < shares ? kRowTile * i / shares : 0;
    const int64_t some = i < shares ? kRowTile * (i + 1) / shares - first : 0;
    const auto* x_tile = x + begin * x_stride;
    float* const to = sums + begin * kUnitRows;
    if (some == 0) {
      tile_of<L, 0>(count, rows, first, x_tile, x_stride, to);
    } else if (some == 1) {
      tile_of<L, 1>(count, rows, first, x_tile, x_stride, to);
    } else if (some == 2) {
      tile_of<L, 2>(count, rows, first, x_tile, x_stride, to);
    } else {
      tile_of<L, kRowTile>(count, rows, first, x_tile, x_stride, to);
    }
    begin = end;
  }
}

template <class L, class W>
__attribute__((noinline)) void convert_rest(const W* from, int64_t count, typename L::Element* to) {
  W rest[kConvertStep] = {};
  std::memcpy(rest, from, static_cast<size_t>(count) * sizeof(W));
  Converter<L, W>::convert(rest, to);
}

// Elements [first, first + size) of a row, and zeros up to the next multiple of the step; the last kConvertStep of them
// are written in full.
template <class L, class W>
void convert_row(const Product& p, int64_t row, int64_t first, int64_t size, int64_t lead, typename L::Element* to) {
  const auto* from = reinterpret_cast<const W*>(p.weight + row * p.row_bytes) + first;
  int64_t k = 0;
  for (; k + kConvertStep <= size; k += kConvertStep) {
    fetch(from + k, lead);
    Converter<L, W>::convert(from + k, to + k);
  }
  if (k < size) convert_rest<L, W>(from + k, size - k, to + k);
  for (int64_t i = size; i % L::kStep != 0; ++i) to[i] = {};
}

// From a tile of rows in one block of K to the one read after it; zero at the end.
template <class L, class W>
int64_t lead_of(const Product& p, int64_t row, int64_t first) {
  if (row + kRowTile < p.rows) return kRowTile * p.row_bytes;
  if (first + kBlock<L> >= p.depth) return 0;
  return kBlock<L> * static_cast<int64_t>(sizeof(W)) - row * p.row_bytes;
}

// A tile from row r on in a block of K, where it lies or converted.
template <class L, class W>
FloatRows<L> rows_of(const Product& p, int64_t r, int64_t first, int64_t size, bool in_place, void* buffer) {
  using Element = typename L::Element;
  auto* const expanded = static_cast<Element*>(buffer);
  const int64_t row_count = p.rows - r < kRowTile ? p.rows - r : kRowTile;
  FloatRows<L> rows = {{}, (size + L::kStep - 1) / L::kStep * L::kStep, 0};
  if constexpr (std::is_same_v<W, Unpacked>) {
    p.unpacking.unpack(*p.quantized, p.first_row + r, row_count, first, size, p.lead_of(r, kRowTile), buffer,
                       kBlockBytes);
  } else {
    rows.lead = lead_of<L, W>(p, r, first);
  }
  for (int64_t i = 0; i < kRowTile; ++i) {
    // A short last tile repeats its last row; nobody reads those sums.
    const int64_t row = i < row_count ? i : row_count - 1;
    rows.row[i] = expanded + row * kBlock<L>;
    if (std::is_same_v<W, Unpacked>) continue;
    if (in_place) {
      rows.row[i] = reinterpret_cast<const Element*>(p.weight + (r + row) * p.row_bytes) + first;
    } else if (row == i) {
      if constexpr (!std::is_same_v<W, Unpacked>)
        convert_row<L, W>(p, r + row, first, size, rows.lead, expanded + row * kBlock<L>);
    }
  }
  return rows;
}

// One token, whose products with stored rows are summed as these are unpacked.
inline void sum_stored_rows(const Product& p, float* sums) {
  constexpr int64_t kAhead = 8 << 10;
  const int64_t later = kRowTile * ((kAhead + kRowTile * p.row_bytes - 1) / (kRowTile * p.row_bytes));
  for (int64_t r = 0; r < p.rows; r += kRowTile)
    p.unpacking.one(*p.quantized, p.first_row + r, std::min(kRowTile, p.rows - r), p.x, p.lead_of(r, later), 1,
                    sums + r, kUnitRows);
}

template <class L, class W>
void multiply(const Product& p, void* expanded, float* sums) {
  if constexpr (std::is_same_v<W, Unpacked>)
    if (p.tokens == 1 && p.unpacking.one != nullptr) return sum_stored_rows(p, sums);
  using Element = typename L::Element;
  for (int64_t first = 0; first < p.depth; first += kBlock<L>) {
    const int64_t size = p.depth - first < kBlock<L> ? p.depth - first : kBlock<L>;
    const bool in_place = std::is_same_v<W, Element> && size % L::kStep == 0;
    for (int64_t r = 0; r < p.rows; r += kRowTile) {
      const FloatRows<L> rows = rows_of<L, W>(p, r, first, size, in_place, expanded);
      all_tokens<L>(rows, in_place, p.tokens, reinterpret_cast<const Element*>(p.x) + first,
                    p.x_bytes / static_cast<int64_t>(sizeof(Element)), sums + r);
    }
  }
}

template <class L, class X>
void prepare(const void* x, int64_t x_bytes, int64_t count, int64_t depth, void* out) {
  const int64_t padded = (depth + L::kStep - 1) / L::kStep * L::kStep;
  auto* to = static_cast<float*>(out);
  for (int64_t t = 0; t < count; ++t, to += padded) {
    const auto* from = reinterpret_cast<const X*>(static_cast<const char*>(x) + t * x_bytes);
    for (int64_t i = 0; i < depth; ++i) from_float(to_float(from[i]), to[i]);
    for (int64_t i = depth; i < padded; ++i) to[i] = 0.0f;
  }
}

// How matrices like one are multiplied with tokens X.
template <class X>
Unpacking unpacking_of(const Quantized& like) {
  Unpacking result = {unpack_floats_of<X>(like)};
#if defined(__AVX2__) && !defined(__AVX512F__)
  if constexpr (std::is_same_v<X, float>) result.one = sum_floats_of(like);
#endif
  return result;
}

template <class L, class X, class W>
Kernel kernel() {
  using S = typename L::Simd;
  void (*transposed)(const Product&, void*, float*) = nullptr;
  constexpr bool kFloats = !std::is_same_v<W, Unpacked>;
  if constexpr (kFloats) transposed = multiply_transposed<S, W>;
  return {.step = L::kStep,
          .element_bytes = sizeof(float),
          .gap_bytes = 0,
          .token_step = 1,
          .in_place = std::is_same_v<X, float>,
          .scratch_bytes = std::max(kRowTile * kBlockBytes, kFloats ? kTransposedScratch : 0),
          .multiply = multiply<L, W>,
          .multiply_transposed = transposed,
          .turn = nullptr,
          .prepare = prepare<L, X>,
          .store = store<S, X>,
          .activate = activate<S, X>,
          .unpacking = unpacking_of<X>};
}

template <class L, class X>
Kernel kernel_for(WeightType weight) {
  switch (weight) {
    case WeightType::kBFloat16:
      return kernel<L, X, Bf16>();
    case WeightType::kFloat16:
      return kernel<L, X, Fp16>();
    case WeightType::kQuantized:
      return kernel<L, X, Unpacked>();
    case WeightType::kFloat32:
      break;
  }
  return kernel<L, X, float>();
}

template <class S>
Kernel float_kernel(DType x, WeightType weight) {
  switch (x) {
    case DType::kBFloat16:
      return kernel_for<FloatLanes<S>, Bf16>(weight);
    case DType::kFloat16:
      return kernel_for<FloatLanes<S>, Fp16>(weight);
    case DType::kFloat32:
      break;
  }
  return kernel_for<FloatLanes<S>, float>(weight);
}

}  // namespace
}  // namespace moelight
