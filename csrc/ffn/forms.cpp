#include "forms.h"

#include <algorithm>
#include <atomic>

namespace moelight {
namespace {

// One more than a form; 0: none is set.
std::atomic<int> chosen_forms[kProductClasses][kFormSizes];
std::atomic<int64_t> counts[kProductClasses][std::max(kBf16ProductForms, kInt8ProductForms)];

int chosen(ProductClass products, int size) {
  return chosen_forms[static_cast<int>(products)][size].load(std::memory_order_relaxed) - 1;
}

}  // namespace

Bf16Products bf16_form(ProductClass products, int size) {
  const Bf16Products best = bf16_products();
  if (bf16_products_forced() || active_isa() != Isa::kAvx512 || best == Bf16Products::kWide) return best;
  const int largest = chosen(products, kFormSizes - 1), form = chosen(products, size);
  const Bf16Products of_most = largest < 0 ? best : static_cast<Bf16Products>(largest);
  if (form < 0 || sums_in_tiles(static_cast<Bf16Products>(form)) != sums_in_tiles(of_most)) return of_most;
  return static_cast<Bf16Products>(form);
}

Int8Products int8_form(ProductClass products, int size) {
  const Int8Products best = int8_products();
  if (int8_products_forced()) return best;
  const int form = chosen(products, size);
  if (form >= 0 && int8_products_run(static_cast<Int8Products>(form))) return static_cast<Int8Products>(form);
  return usual_form(products, best);
}

bool set_form(ProductClass products, int size, int form) {
  const bool runs = has_integers(products)
                        ? int8_products_run(static_cast<Int8Products>(form))
                        : form != static_cast<int>(Bf16Products::kWide) && active_isa() == Isa::kAvx512 &&
                              bf16_products_run(static_cast<Bf16Products>(form));
  if (runs) chosen_forms[static_cast<int>(products)][size].store(form + 1, std::memory_order_relaxed);
  return runs;
}

void unset_forms() {
  for (auto& sizes : chosen_forms)
    for (auto& form : sizes) form.store(0, std::memory_order_relaxed);
}

void count_product(ProductClass products, int form) {
  counts[static_cast<int>(products)][form].fetch_add(1, std::memory_order_relaxed);
}
int64_t products_counted(ProductClass products, int form) {
  return counts[static_cast<int>(products)][form].load(std::memory_order_relaxed);
}

}  // namespace moelight
