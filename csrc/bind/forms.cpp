// Which form of products serves which weights and rows.

#include "ffn/forms.h"

#include <nanobind/stl/string.h>

#include <string>

#include "checks.h"

namespace moelight::bind {
namespace {

constexpr const char* kClassNames[] = {"bf16", "low", "high", "fine", "coarse"};

ProductClass product_class(const std::string& name) {
  for (int i = 0; i < kProductClasses; ++i)
    if (name == kClassNames[i]) return static_cast<ProductClass>(i);
  refuse("products", "must be bf16, low, high, fine or coarse, is '" + name + "'");
}

std::string form_name(ProductClass products, int form) {
  return has_integers(products) ? kInt8ProductNames[form] : kBf16ProductNames[form];
}

int form_named(ProductClass products, const std::string& name) {
  const int count = has_integers(products) ? kInt8ProductForms : kBf16ProductForms;
  for (int form = 0; form < count; ++form)
    if (name == form_name(products, form)) return form;
  refuse("form", "is none of " + std::string(kClassNames[static_cast<int>(products)]) + ": '" + name + "'");
}

std::string product_form(const std::string& name, int64_t rows) {
  const ProductClass products = product_class(name);
  const int size = form_size(rows);
  return form_name(products, has_integers(products) ? static_cast<int>(int8_form(products, size))
                                                    : static_cast<int>(bf16_form(products, size)));
}

std::string usual_product_form(const std::string& name, const std::string& best) {
  const ProductClass products = product_class(name);
  const int form = form_named(products, best);
  if (!has_integers(products)) return best;
  return form_name(products, static_cast<int>(usual_form(products, static_cast<Int8Products>(form))));
}

// Those that run here, of equal bits but for tiles of bfloat16; tiles are emulated in tests alone.
nb::list product_forms(const std::string& name) {
  nb::list names;
  const ProductClass products = product_class(name);
  if (has_integers(products)) {
    for (const auto how : {Int8Products::kWide, Int8Products::kDots, Int8Products::kTiles})
      if (int8_products_run(how)) names.append(form_name(products, static_cast<int>(how)));
    return names;
  }
  if (active_isa() != Isa::kAvx512 || !bf16_products_run(Bf16Products::kPairs)) {
    names.append(product_form(name, 1));
    return names;
  }
  for (const auto how : {Bf16Products::kPairs, Bf16Products::kHalves, Bf16Products::kTiles})
    if (bf16_products_run(how)) names.append(form_name(products, static_cast<int>(how)));
  return names;
}

void set_product_form(const std::string& name, int64_t rows, const std::string& form) {
  const ProductClass products = product_class(name);
  if (!set_form(products, form_size(rows), form_named(products, form)))
    refuse("form", form + " do not run on this processor, or to other bits");
}

int64_t counted_products(const std::string& name, const std::string& form) {
  const ProductClass products = product_class(name);
  return products_counted(products, form_named(products, form));
}

}  // namespace

void add_forms(nb::module_& module) {
  using namespace nanobind::literals;
  module.def("product_forms", product_forms, "products"_a);
  module.def("product_form", product_form, "products"_a, "rows"_a);
  module.def("usual_product_form", usual_product_form, "products"_a, "best"_a);
  module.def("set_product_form", set_product_form, "products"_a, "rows"_a, "form"_a);
  module.def("unset_product_forms", unset_forms);
  module.def("counted_products", counted_products, "products"_a, "form"_a);
}

}  // namespace moelight::bind
