// Which form of products serves weights of a class that meet some rows. Forms of a class give the same bits, but for
// tiles of bfloat16: these serve all rows of a class or none. So the choice is one of time alone, and may be measured.
#pragma once

#include <cstdint>

#include "moelight/cpu.h"

namespace moelight {

// bfloat16; quantised, of fewer than eight bits or of more, and multiplied as bfloat16; or as whole numbers that int8
// activations meet, with a scale or step for at most 32 columns, or for more.
enum class ProductClass : int { kBf16 = 0, kLow = 1, kHigh = 2, kFine = 3, kCoarse = 4 };
inline constexpr int kProductClasses = 5;
inline constexpr bool has_integers(ProductClass products) { return products >= ProductClass::kFine; }

// Numbers of rows that have a form each; others have that of the nearest by ratio.
inline constexpr int64_t kFormRows[] = {1, 4, 16, 64};
inline constexpr int kFormSizes = 4;
inline constexpr int form_size(int64_t rows) { return rows < 2 ? 0 : rows < 8 ? 1 : rows < 32 ? 2 : 3; }

// Tiles add the products of a row in another order than vectors do.
inline constexpr bool sums_in_tiles(Bf16Products form) {
  return form == Bf16Products::kTiles || form == Bf16Products::kEmulated;
}

// Where nothing was measured, `best` being the form of the highest peak: sums that leave their tiles every 32 columns
// do not repay.
inline constexpr Int8Products usual_form(ProductClass products, Int8Products best) {
  return best == Int8Products::kTiles && products == ProductClass::kFine ? Int8Products::kDots : best;
}

// The form in force: of all products, where one is forced; else the one set; else the usual one, for bfloat16 that of
// the most rows, as where the one set sums in another order than that.
Bf16Products bf16_form(ProductClass products, int size);
Int8Products int8_form(ProductClass products, int size);

// A Bf16Products, or an Int8Products where the class has integers. False, and no change, where it does not run here or
// has other bits.
bool set_form(ProductClass products, int size, int form);
void unset_forms();

// Calls of `linear` and of a product of `expert_ffn` since the process began, by the form that served them.
void count_product(ProductClass products, int form);
int64_t products_counted(ProductClass products, int form);

}  // namespace moelight
