// Products of tokens rounded to int8 with quantised matrices, whose codes stay whole numbers. Included by one file for
// each instruction set; all of it has internal linkage.
//
// A token is cut into groups of columns (IntegerForm); each is a float32 scale, its largest magnitude over 127, times
// int8 numbers, rounded to nearest, ties to even. A group of a row is parts with scales of their own. A sum takes the
// groups in order, and in a group the parts, each product and each sum rounded to float32: the exact sum of a part's
// (code - zero) times int8 numbers, times the scale of the part; the parts' sum times the scale of the token. So
// neither other tokens nor the instruction set change a bit of it.
//
// Codes of kPanelRows rows and kPanelColumns columns are spread in the first-level cache (quantized/integers.h); every
// tile of tokens passes by, a lane a row, four columns at a time.
#pragma once

#include <cmath>

#include "finish.h"
#include "quantized/integers.h"

namespace moelight {
namespace {

// S without fused multiply-adds: every instruction set rounds alike.
template <class S>
struct Unfused : S {
  static typename S::V fma(typename S::V x, typename S::V y, typename S::V z) { return S::add(S::mul(x, y), z); }
};

// A prepared token: `columns` numbers, in the order of the form, then of each group its scale, then of each part minus
// the sum of its numbers times the zero point, or times 1 where the form has none, and as float32 where it has `least`.
// All of it has room in kTokenBytes a column.
struct IntegerTokens {
  static constexpr int64_t kStep = 32, kTokenBytes = 2;
  int64_t columns, groups;
  IntegerTokens(const IntegerForm& form, int64_t depth)
      : columns((depth + kStep - 1) / kStep * kStep), groups((depth + form.group - 1) / form.group) {}
  int64_t scales() const { return columns; }
  int64_t sums() const { return columns + 4 * groups; }
};

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
      alignas(64) float numbers[kMostGroup];
      uint32_t largest = 0;  // bits of magnitudes stand in their order
      for (int64_t i = 0; i < size; ++i) {
        numbers[i] = to_float(from[k + i]);
        largest = std::max(largest, to_bits(numbers[i]) & 0x7fffffff);
      }
      const Rounding by(from_bits(largest));
      std::memcpy(to + layout.scales() + 4 * g, &by.scale, 4);
      for (int64_t i = 0; i < size; i += form.part) {
        const int64_t some = std::min(form.part, size - i);
        const int32_t sum = L::round(numbers + i, some, by.factor, form.pairs, reinterpret_cast<int8_t*>(to + k + i));
        const int32_t minus = -sum * times;
        const uint32_t bits = form.least ? to_bits(static_cast<float>(minus)) : static_cast<uint32_t>(minus);
        std::memcpy(to + layout.sums() + 4 * ((k + i) / form.part), &bits, 4);
      }
    }
  }
}

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

// A tile: all rows of a panel times kCount tokens. kParted: groups of rows are several parts.
template <class L, bool kParted, int kCount>
void panel_tile(const IntegerForm& form, const IntegerTokens& layout, const Panel& panel, int64_t first, int64_t size,
                const char* x, int64_t x_bytes, float* sums) {
  using S = typename L::Simd;
  constexpr int kVectors = L::kVectors;
  constexpr int64_t kLanes = S::kWidth, kBytes = 4 * kLanes;
  // Sums of whole numbers in parts, so that few tokens do not wait for one product after the other.
  constexpr int kMore = L::kTokens < 4 || kCount > 3 ? 0 : kCount == 1 ? 3 : 1;
  const auto at = [&](int64_t c, int64_t offset) { return x + c * x_bytes + offset; };
  for (int64_t row = 0; row < kPanelRows; row += kVectors * kLanes) {
    const uint8_t* codes = panel.codes + 4 * row;
    for (int64_t begin = 0; begin < size; begin += form.group) {
      const int64_t end = std::min(begin + form.group, size), group = (first + begin) / form.group;
      typename S::V all[kCount][kVectors];  // the sums of the parts
      for (int64_t k = begin, p = begin / form.part; k < end; k += form.part, ++p) {
        const int64_t whole = std::min(form.part, (size - k + 7) / 8 * 8), part = first / form.part + p;
        typename L::V sum[kCount][kVectors], more[kMore + 1][kCount][kVectors];
#pragma GCC unroll 8
        for (int c = 0; c < kCount; ++c) {
          const char* const minus = at(c, layout.sums() + 4 * part);
#pragma GCC unroll 2
          for (int v = 0; v < kVectors; ++v) {
            sum[c][v] = form.zero >= 0 ? (form.least ? L::zero() : L::spread(minus))
                                       : L::times(panel.zeros[p] + row + v * kLanes, minus);
#pragma GCC unroll 4
            for (int i = 0; i < kMore; ++i) more[i][c][v] = L::zero();
          }
        }
        const char* numbers = x + first + k;
        const auto quad = [&](typename L::V(&to)[kCount][kVectors]) {
          typename L::V code[kVectors];
#pragma GCC unroll 2
          for (int v = 0; v < kVectors; ++v) code[v] = L::load(codes + v * kBytes);
#pragma GCC unroll 8
          for (int c = 0; c < kCount; ++c) {
            const typename L::V four = L::spread(numbers + c * x_bytes);
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; ++v) to[c][v] = L::dot(to[c][v], code[v], four);
          }
          codes += 4 * kPanelRows, numbers += 4;
        };
        int64_t i = 0;
        for (; i + 4 * kMore < whole; i += 4 * (kMore + 1)) {
          quad(sum);
#pragma GCC unroll 4
          for (int each = 0; each < kMore; ++each) quad(more[each]);
        }
        for (; i < whole; i += 4) quad(sum);
#pragma GCC unroll 8
        for (int c = 0; c < kCount; ++c) {
#pragma GCC unroll 2
          for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 4
            for (int each = 0; each < kMore; ++each) sum[c][v] = L::add(sum[c][v], more[each][c][v]);
            const auto product = S::mul(L::floats(sum[c][v]), S::load(panel.scales[p] + row + v * kLanes));
            all[c][v] = !kParted || k == begin ? product : S::add(all[c][v], product);
          }
          if (form.least) {
            float minus;
            std::memcpy(&minus, at(c, layout.sums() + 4 * part), sizeof minus);
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; ++v)
              all[c][v] = S::add(all[c][v], S::mul(S::load(panel.least[p] + row + v * kLanes), S::set(minus)));
          }
        }
      }
#pragma GCC unroll 8
      for (int c = 0; c < kCount; ++c) {
        float scale;
        std::memcpy(&scale, at(c, layout.scales() + 4 * group), sizeof scale);
        float* const to = sums + c * kUnitRows + row;
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v)
          S::store(to + v * kLanes, S::add(S::load(to + v * kLanes), S::mul(all[c][v], S::set(scale))));
      }
    }
  }
}

template <class L, bool kParted, int kCount>
void panel_tile_of(int64_t count, const IntegerForm& form, const IntegerTokens& layout, const Panel& panel,
                   int64_t first, int64_t size, const char* x, int64_t x_bytes, float* sums) {
  if (count == kCount) return panel_tile<L, kParted, kCount>(form, layout, panel, first, size, x, x_bytes, sums);
  if constexpr (kCount > 1) panel_tile_of<L, kParted, kCount - 1>(count, form, layout, panel, first, size, x, x_bytes, sums);
}

template <class L>
void multiply_integers(const Product& p, void* scratch, float* sums) {
  auto& panel = *static_cast<Panel*>(scratch);
  const Quantized& q = *p.quantized;
  const IntegerForm form = integer_form(q);
  const IntegerTokens layout(form, p.depth);
  const int64_t tiles = (p.tokens + L::kTokens - 1) / L::kTokens;
  for (int64_t row = 0; row < p.rows; row += kPanelRows) {
    const int64_t rows = std::min(kPanelRows, p.rows - row);
    Fetched fetched = {nullptr};
    if (p.weight != nullptr) fetched.next = row + rows < p.rows ? p.weight + (row + rows) * p.row_bytes : p.next;
    for (int64_t first = 0; first < p.depth; first += kPanelColumns) {
      const int64_t size = std::min(kPanelColumns, p.depth - first);
      L::fill(q, form, p.first_row + row, rows, first, size, fetched, panel);
      for (int64_t i = 0, begin = 0; i < tiles; ++i) {
        const int64_t end = p.tokens * (i + 1) / tiles;
        const auto tile = form.part < form.group ? panel_tile_of<L, true, L::kTokens> : panel_tile_of<L, false, L::kTokens>;
        tile(end - begin, form, layout, panel, first, size, p.x + begin * p.x_bytes, p.x_bytes,
             sums + begin * kUnitRows + row);
        begin = end;
      }
    }
  }
}

template <class L, class X>
Kernel integer_kernel() {
  using S = Unfused<typename L::Simd>;
  return {.step = IntegerTokens::kStep,
          .element_bytes = IntegerTokens::kTokenBytes,
          .head_bytes = 64,  // after one token, so that many do not share cache sets
          .token_step = 1,
          .in_place = false,
          .scratch_bytes = sizeof(Panel),
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

}  // namespace
}  // namespace moelight
