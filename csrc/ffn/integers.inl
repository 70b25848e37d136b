// Products of tokens rounded to int8 with quantised matrices, whose codes stay whole numbers. Included by one file for
// each instruction set; all of it has internal linkage.
//
// A token is cut into groups of columns (IntegerForm); each is a float32 scale, its largest magnitude over 127, times
// int8 numbers, rounded to nearest, ties to even. A sum takes the groups in order, each product and each sum rounded to
// float32: the exact sum of (code - zero) times int8 numbers, in forms of parts times their steps, times the scale of
// the row; less, where the form has it, the exact sum of `low` (1 without parts) times int8 numbers, times `least`;
// times the scale of the token. So neither other tokens nor the instruction set change a bit of it.
//
// Codes of kPanelRows rows and kPanelColumns columns are spread in the first-level cache (quantized/integers.h); every
// tile of tokens passes by, a lane a row, four columns at a time. Where L::kStored says so, few tokens meet the codes
// as they are stored instead. Where a processor has tiles (tiles/integers.h), they sum the products of each part for
// kTileTokens tokens first: sums of whole numbers are exact in any order.
#pragma once

#include <cmath>

#include "finish.h"
#include "quantized/integers.h"
#include "tiles/integers.h"

namespace moelight {
namespace {

// S without fused multiply-adds: every instruction set rounds alike.
template <class S>
struct Unfused : S {
  static typename S::V fma(typename S::V x, typename S::V y, typename S::V z) { return S::add(S::mul(x, y), z); }
};

// A prepared token: `columns` numbers, in the order of the form, then of each group its scale, then of each part minus
// the sum of its numbers times the zero point, or times 1 where the form has none; where it has `least`, the sum as
// int16. All of it has room in kTokenBytes a column. Lanes that multiply signed codes of eight bits have as much again
// for the magnitudes of the numbers and for masks, and behind the sums what turned codes lack.
struct IntegerTokens {
  static constexpr int64_t kStep = 32, kTokenBytes = 2;
  int64_t columns, groups;
  IntegerTokens(const IntegerForm& form, int64_t depth)
      : columns((depth + kStep - 1) / kStep * kStep), groups((depth + form.group - 1) / form.group) {}
  int64_t scales() const { return columns; }
  int64_t sums() const { return columns + 4 * groups; }
  int64_t turned() const { return columns + 8 * groups; }
  int64_t magnitudes() const { return kTokenBytes * columns; }
  int64_t masks() const { return magnitudes() + columns; }
};

// The largest code of narrow ones; others are of eight bits, and meet numbers that are split where L does that.
constexpr int kMaxNarrowCode = 127;
template <class L>
constexpr bool kSplitsTokens = requires(const char* values, char* to) { L::split(values, 0, to, to); };

// Scale, and what brings numbers to int8: neither of numbers so small that their quotient would not be finite.
struct Rounding {
  float scale, factor;
  explicit Rounding(float largest) : scale(0), factor(0) {
    if (!(largest < from_bits(0x7f800000))) {
      scale = from_bits(0x7fc00000);
    } else if (largest >= 1.0e-30f) {
      scale = largest / 127.0f, factor = 127.0f / largest;
    }
  }
};

template <class L, class X>
void quantise(const Quantized& like, const void* x, int64_t x_bytes, int64_t count, void* out, int64_t out_bytes) {
  const IntegerForm form = integer_form(like);
  const IntegerTokens layout(form, like.columns);
  const int32_t times = form.zero > 0 ? form.zero : 1;
  for (int64_t t = 0; t < count; ++t) {
    const auto* from = reinterpret_cast<const X*>(static_cast<const char*>(x) + t * x_bytes);
    char* const to = static_cast<char*>(out) + t * out_bytes;
    std::memset(to + like.columns / 8 * 8, 0, static_cast<size_t>(layout.columns - like.columns / 8 * 8));
    for (int64_t k = 0, g = 0; k < like.columns; k += form.group, ++g) {
      const int64_t size = std::min(form.group, like.columns - k);
      alignas(64) float values[kMostGroup];
      uint32_t largest = 0;  // bits of magnitudes stand in their order
      for (int64_t i = 0; i < size; ++i) {
        values[i] = to_float(from[k + i]);
        largest = std::max(largest, to_bits(values[i]) & 0x7fffffff);
      }
      const Rounding by(from_bits(largest));
      std::memcpy(to + layout.scales() + 4 * g, &by.scale, 4);
      for (int64_t i = 0; i < size; i += form.part) {
        const int64_t some = std::min(form.part, size - i);
        const int32_t sum = L::round(values + i, some, by.factor, form.pairs, reinterpret_cast<int8_t*>(to + k + i));
        const int64_t part = (k + i) / form.part;
        if (form.least) {
          const auto narrow = static_cast<int16_t>(sum);
          std::memcpy(to + layout.sums() + 2 * part, &narrow, 2);
        } else {
          const int32_t minus = -sum * times;
          std::memcpy(to + layout.sums() + 4 * part, &minus, 4);
        }
        if constexpr (kSplitsTokens<L>) {
          if (form.max_code <= kMaxNarrowCode) continue;
          const int32_t offset = form.zero >= 0 ? (128 - form.zero) * sum : 0;
          const int32_t turned = offset + L::split(to + k, size, to + layout.magnitudes() + k, to + layout.masks() + k);
          std::memcpy(to + layout.turned() + 4 * part, &turned, 4);
        }
      }
    }
  }
}

// What lanes L are: those of whole numbers beside those of float32 (Simd).

// Multiplies as multiply_integers does without panels, or says that it does not.
using StoredProducts = bool (*)(const Product&, const IntegerForm&, const IntegerTokens&, char* scratch, float* sums);
// sums[t][r] += the products of columns [first, first + size) of a panel with `tokens` tokens.
using PanelProducts = void (*)(const IntegerForm&, const IntegerTokens&, const Panel&, int64_t first, int64_t size,
                               const char* x, int64_t x_bytes, int64_t tokens, float* sums);

// In plain code, for L::round: sum of the numbers, of which the last ones may be none of eight.
inline int32_t round_plainly(const float* from, int64_t size, float factor, bool pairs, int8_t* to) {
  int32_t sum = 0;
  for (int64_t i = 0; i < size; ++i) {
    const auto number = static_cast<int8_t>(factor == 0 ? 0.0f : std::nearbyint(from[i] * factor));
    to[pairs ? i / 8 * 8 + i % 2 * 4 + i % 8 / 2 : i] = number;
    sum += number;
  }
  return sum;
}

// Of a processor without tiles.
struct NoTiles {
  static constexpr bool kAvailable = false;
};

constexpr int64_t kTileTokens = 16;

// What tiles sum: of every part of a panel the products of its rows with kTileTokens tokens.
struct PartSums {
  alignas(64) int32_t of[kPanelParts][kTileTokens][kPanelRows];
};

// What a tile is: all rows of a panel times kCount tokens. kSummed: the products of each part are summed already.
template <class L, class IntegerShape, int kCount, bool kSummed>
struct SumTile {
  using S = typename L::Simd;
  static constexpr int kVectors = L::kVectors;
  static constexpr int64_t kLanes = S::kWidth;
  // Sums of whole numbers in parts, so that few tokens do not wait for one product after the other.
  static constexpr int kMore = kSummed || L::kTokens < 4 || kCount > 3 ? 0 : kCount == 1 ? 3 : 1;
  using Sums = typename L::V[kCount][kVectors];

  const char* x;  // numbers of the next four columns
  int64_t x_bytes;
  const uint8_t* codes;   // of the next four columns
  const int32_t* summed;  // of the next part, [kTileTokens][kPanelRows]

  template <class F>
  static inline __attribute__((always_inline)) void for_each(F&& body) {
#pragma GCC unroll 8
    for (int c = 0; c < kCount; ++c)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) body(c, v);
  }

  inline __attribute__((always_inline)) void quad(const char* values, Sums& to) {
    typename L::V code[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) code[v] = L::load(codes + v * 4 * kLanes);
#pragma GCC unroll 8
    for (int c = 0; c < kCount; ++c) {
      const typename L::V four = L::spread(values + c * x_bytes);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) to[c][v] = L::dot(to[c][v], code[v], four);
    }
    codes += 4 * kPanelRows;
  }

  // sum += codes times numbers, of the next `count` columns, which are those of the next part. kColumns: as many as
  // that, where it is not 0; what is behind the last column meets zeros.
  template <int64_t kColumns>
  inline __attribute__((always_inline)) void add(int64_t count, Sums& sum) {
    if constexpr (kSummed) {
      for_each([&](int c, int v) { sum[c][v] = L::add(sum[c][v], L::load(summed + c * kPanelRows + v * kLanes)); });
      summed += kTileTokens * kPanelRows;
      return;
    }
    if constexpr (kColumns > 0 && kMore == 0) {
#pragma GCC unroll 8
      for (int i = 0; i < kColumns; i += 4, x += 4) quad(x, sum);
      return;
    }
    const char* const end = x + count;
    if constexpr (kMore > 0) {
      Sums more[kMore];
      for (auto& some : more) for_each([&](int c, int v) { some[c][v] = L::zero(); });
      for (; x + 4 * kMore < end;) {
        quad(x, sum), x += 4;
#pragma GCC unroll 4
        for (int i = 0; i < kMore; ++i) quad(x, more[i]), x += 4;
      }
#pragma GCC unroll 4
      for (int i = 0; i < kMore; ++i) for_each([&](int c, int v) { sum[c][v] = L::add(sum[c][v], more[i][c][v]); });
    }
    for (; x < end; x += 4) quad(x, sum);
  }
};

// What a form says before it is met: columns of a token that share a scale, columns of a row that share a step, and
// `least`. 0: the form says so itself, and there are no steps.
template <int64_t kGroup_, int64_t kPart_ = 0, bool kLeast_ = false>
struct IntegerShape {
  static constexpr int64_t kGroup = kGroup_, kPart = kPart_;
  static constexpr bool kLeast = kLeast_;
};

template <class F>
void with_shape(const IntegerForm& form, F&& body) {
  if (form.least) return form.parted() ? body(IntegerShape<256, 32, true>()) : body(IntegerShape<32, 0, true>());
  if (form.parted()) return body(IntegerShape<256, 16>());
  if (form.group == 32) return body(IntegerShape<32>());
  body(IntegerShape<0>());
}

// Of forms without parts: sums of float32 stay in registers from group to group. Here and below form and layout are
// copies, which no store can change.
template <class L, class IntegerShape, int kCount, bool kSummed>
void grouped_tile(const IntegerForm form, const IntegerTokens layout, const Panel& panel, int64_t first, int64_t size,
                  const char* x, int64_t x_bytes, float* __restrict sums, const int32_t* summed) {
  using T = SumTile<L, IntegerShape, kCount, kSummed>;
  using S = typename L::Simd;
  constexpr int64_t kLanes = S::kWidth, kSumBytes = IntegerShape::kLeast ? 2 : 4;
  const int64_t group = IntegerShape::kGroup > 0 ? IntegerShape::kGroup : form.group;
  for (int64_t row = 0; row < kPanelRows; row += T::kVectors * kLanes) {
    T tile = {x + first, x_bytes, panel.codes + 4 * row, kSummed ? summed + row : nullptr};
    const char* by = x + layout.scales() + 4 * (first / group);
    const char* group_sums = x + layout.sums() + kSumBytes * (first / group);
    const float *scales = panel.scales[0] + row, *least = panel.least[0] + row;
    const int32_t* zeros = panel.zeros[0] + row;
    typename S::V total[kCount][T::kVectors];
    T::for_each([&](int c, int v) { total[c][v] = S::load(sums + c * kUnitRows + row + v * kLanes); });
    for (int64_t k = 0; k < size; k += group, by += 4, group_sums += kSumBytes) {
      typename T::Sums sum;
      T::for_each([&](int c, int v) {
        if constexpr (IntegerShape::kLeast) {
          sum[c][v] = L::zero();
        } else {
          const char* const minus = group_sums + c * x_bytes;
          sum[c][v] = form.zero >= 0 ? L::spread(minus) : L::times(zeros + v * kLanes, minus);
        }
      });
      tile.template add<IntegerShape::kGroup>(std::min(group, (size - k + 7) / 8 * 8), sum);
      T::for_each([&](int c, int v) {
        float scale;
        std::memcpy(&scale, by + c * x_bytes, sizeof scale);
        auto value = S::mul(L::floats(sum[c][v]), S::load(scales + v * kLanes));
        if constexpr (IntegerShape::kLeast) {
          int16_t low;
          std::memcpy(&low, group_sums + c * x_bytes, sizeof low);
          value = S::sub(value, S::mul(S::set(static_cast<float>(low)), S::load(least + v * kLanes)));
        }
        total[c][v] = S::add(total[c][v], S::mul(value, S::set(scale)));
      });
      scales += kPanelRows, zeros += kPanelRows, least += kPanelRows;
    }
    T::for_each([&](int c, int v) { S::store(sums + c * kUnitRows + row + v * kLanes, total[c][v]); });
  }
}

// value = all scale - low least: those of a group's parts.
template <class L, class T, class IntegerShape, class Value>
inline __attribute__((always_inline)) void take_lows(const char* part_sums, const int32_t*& lows, const float* least,
                                                     int64_t x_bytes, Value& value) {
  using S = typename L::Simd;
  typename T::Sums low;
  T::for_each([&](int c, int v) { low[c][v] = L::zero(); });
#pragma GCC unroll 4
  for (int64_t p = 0; p < IntegerShape::kGroup / IntegerShape::kPart; p += 2, lows += kPanelRows) {
    T::for_each([&](int c, int v) {
      low[c][v] = L::words(low[c][v], L::load(lows + v * S::kWidth), L::spread(part_sums + 2 * p + c * x_bytes));
    });
  }
  T::for_each([&](int c, int v) {
    value[c][v] = S::sub(value[c][v], S::mul(L::floats(low[c][v]), S::load(least + v * S::kWidth)));
  });
}

// Of forms of parts.
template <class L, class IntegerShape, int kCount, bool kSummed>
void parted_tile(const IntegerTokens layout, const Panel& panel, int64_t first, int64_t size, const char* x,
                 int64_t x_bytes, float* __restrict sums, const int32_t* summed) {
  using T = SumTile<L, IntegerShape, kCount, kSummed>;
  using S = typename L::Simd;
  constexpr int64_t kLanes = S::kWidth, kParts = IntegerShape::kGroup / IntegerShape::kPart,
                    kSumBytes = IntegerShape::kLeast ? 2 : 4;
  for (int64_t row = 0; row < kPanelRows; row += T::kVectors * kLanes) {
    T tile = {x + first, x_bytes, panel.codes + 4 * row, kSummed ? summed + row : nullptr};
    const char* by = x + layout.scales() + 4 * (first / IntegerShape::kGroup);
    const char* part_sums = x + layout.sums() + kSumBytes * (first / IntegerShape::kPart);
    const int32_t *steps = panel.steps[0] + row, *lows = panel.lows[0] + row;
    for (int64_t k = 0, g = 0; k < size; k += IntegerShape::kGroup, ++g, by += 4, part_sums += kSumBytes * kParts) {
      typename T::Sums all;
      T::for_each([&](int c, int v) { all[c][v] = L::zero(); });
      for (int64_t p = 0; p < kParts; ++p, steps += kPanelRows) {
        typename T::Sums sum;
        if constexpr (IntegerShape::kLeast) {
          T::for_each([&](int c, int v) { sum[c][v] = L::zero(); });
        } else {
          T::for_each([&](int c, int v) { sum[c][v] = L::spread(part_sums + 4 * p + c * x_bytes); });
        }
        tile.template add<IntegerShape::kPart>(IntegerShape::kPart, sum);
        T::for_each(
            [&](int c, int v) { all[c][v] = L::add(all[c][v], L::product(sum[c][v], L::load(steps + v * kLanes))); });
      }
      typename S::V value[kCount][T::kVectors];
      T::for_each([&](int c, int v) {
        value[c][v] = S::mul(L::floats(all[c][v]), S::load(panel.scales[g] + row + v * kLanes));
      });
      if constexpr (IntegerShape::kLeast)
        take_lows<L, T, IntegerShape>(part_sums, lows, panel.least[g] + row, x_bytes, value);
      T::for_each([&](int c, int v) {
        float scale, *const to = sums + c * kUnitRows + row + v * kLanes;
        std::memcpy(&scale, by + c * x_bytes, sizeof scale);
        S::store(to, S::add(S::load(to), S::mul(value[c][v], S::set(scale))));
      });
    }
  }
}

template <class L, class IntegerShape, int kCount, bool kSummed = false>
void panel_tile(const IntegerForm& form, const IntegerTokens& layout, const Panel& panel, int64_t first, int64_t size,
                const char* x, int64_t x_bytes, float* sums, const int32_t* summed = nullptr) {
  if constexpr (IntegerShape::kPart > 0) {
    parted_tile<L, IntegerShape, kCount, kSummed>(layout, panel, first, size, x, x_bytes, sums, summed);
  } else {
    grouped_tile<L, IntegerShape, kCount, kSummed>(form, layout, panel, first, size, x, x_bytes, sums, summed);
  }
}

template <class L, class IntegerShape, int kCount>
void panel_tile_of(int64_t count, const IntegerForm& form, const IntegerTokens& layout, const Panel& panel,
                   int64_t first, int64_t size, const char* x, int64_t x_bytes, float* sums) {
  if (count == kCount) return panel_tile<L, IntegerShape, kCount>(form, layout, panel, first, size, x, x_bytes, sums);
  if constexpr (kCount > 1)
    panel_tile_of<L, IntegerShape, kCount - 1>(count, form, layout, panel, first, size, x, x_bytes, sums);
}

// As panel_tile, of kTileTokens tokens.
template <class L, class T>
void panel_in_tiles(const IntegerForm& form, const IntegerTokens& layout, const Panel& panel, int64_t first,
                    int64_t size, const char* x, int64_t x_bytes, float* sums, PartSums& parts) {
  constexpr int kCount = 4;
  for (int64_t k = 0, part = 0; k < size; k += form.part, ++part)
    multiply_part<T>(x + first + k, x_bytes, panel.codes + k * kPanelRows, std::min(form.part, size - k),
                     parts.of[part][0]);
  with_shape(form, [&](auto shape) {
    for (int64_t t = 0; t < kTileTokens; t += kCount)
      panel_tile<L, decltype(shape), kCount, true>(form, layout, panel, first, size, x + t * x_bytes, x_bytes,
                                                   sums + t * kUnitRows, parts.of[0][t]);
  });
}

template <class L, class T = NoTiles>
void multiply_integers(const Product& p, void* scratch, float* sums) {
  auto& panel = *static_cast<Panel*>(scratch);
  const Quantized& q = *p.quantized;
  const IntegerForm form = integer_form(q);
  const IntegerTokens layout(form, p.depth);
  const FillPanel fill = L::filler(q);
  if constexpr (L::kStored != nullptr)
    if (L::kStored(p, form, layout, static_cast<char*>(scratch), sums)) return;
  const int64_t tiled = T::kAvailable ? p.tokens / kTileTokens * kTileTokens : 0;
  const int64_t rest = p.tokens - tiled, tiles = (rest + L::kTokens - 1) / L::kTokens;
  if constexpr (T::kAvailable)
    if (tiled > 0) T::configure();
  for (int64_t row = 0; row < p.rows; row += kPanelRows) {
    const int64_t rows = std::min(kPanelRows, p.rows - row);
    Fetched fetched = {nullptr};
    p.fetch_scales(row, rows, kPanelRows);
    if (p.weight != nullptr) fetched.next = row + rows < p.rows ? p.weight + (row + rows) * p.row_bytes : p.next;
    for (int64_t first = 0; first < p.depth; first += kPanelColumns) {
      const int64_t size = std::min(kPanelColumns, p.depth - first);
      fill(q, form, p.first_row + row, rows, first, size, fetched, panel);
      if constexpr (T::kAvailable) {
        auto& parts = *reinterpret_cast<PartSums*>(&panel + 1);
        for (int64_t t = 0; t < tiled; t += kTileTokens)
          panel_in_tiles<L, T>(form, layout, panel, first, size, p.x + t * p.x_bytes, p.x_bytes,
                               sums + t * kUnitRows + row, parts);
      }
      if constexpr (requires { L::kPanels; }) {
        L::kPanels(form, layout, panel, first, size, p.x, p.x_bytes, p.tokens, sums + row);
        continue;
      }
      with_shape(form, [&](auto shape) {
        for (int64_t i = 0, begin = tiled; i < tiles; ++i) {
          const int64_t end = tiled + rest * (i + 1) / tiles;
          panel_tile_of<L, decltype(shape), L::kTokens>(end - begin, form, layout, panel, first, size,
                                                        p.x + begin * p.x_bytes, p.x_bytes,
                                                        sums + begin * kUnitRows + row);
          begin = end;
        }
      });
    }
  }
  if constexpr (T::kAvailable)
    if (tiled > 0) T::leave();
}

template <class L, class X>
Kernel integer_kernel() {
  using S = Unfused<typename L::Simd>;
  return {.step = IntegerTokens::kStep,
          .element_bytes = (kSplitsTokens<L> ? 2 : 1) * IntegerTokens::kTokenBytes,
          .gap_bytes = 64,
          .token_step = 1,
          .in_place = false,
          .scratch_bytes = std::max<int64_t>(sizeof(Panel), L::kStoredBytes),
          .multiply = multiply_integers<L>,
          .multiply_transposed = nullptr,
          .turn = nullptr,
          .prepare = nullptr,
          .store = store<S, X>,
          .activate = activate<S, X>,
          .unpacking = [](const Quantized&) { return Unpacking{}; },
          .quantise = quantise<L, X>};
}

template <class L>
Kernel integer_kernel_for(DType x) {
  switch (x) {
    case DType::kBFloat16:
      return integer_kernel<L, Bf16>();
    case DType::kFloat16:
      return integer_kernel<L, Fp16>();
    case DType::kFloat32:
      break;
  }
  return integer_kernel<L, float>();
}

// That of `few`, with the products of at least kTileTokens tokens in tiles.
template <class L, class T, Kernel (*few)(DType)>
Kernel tiled_kernel_for(DType x) {
  Kernel kernel = few(x);
  kernel.scratch_bytes = std::max<int64_t>(kernel.scratch_bytes, sizeof(Panel) + sizeof(PartSums));
  kernel.multiply = [](const Product& p, void* scratch, float* sums) {
    if (p.tokens < kTileTokens) return few(DType::kFloat32).multiply(p, scratch, sums);
    multiply_integers<L, T>(p, scratch, sums);
  };
  return kernel;
}

}  // namespace
}  // namespace moelight
