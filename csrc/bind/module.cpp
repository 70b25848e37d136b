// The module itself, and what it says of the processor. Does not depend on kernels.

#include <nanobind/stl/string.h>

#include "checks.h"
#include "moelight/cpu.h"

namespace moelight::bind {
namespace {

constexpr Isa kIsas[] = {Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kNeon};

nb::list isa_available() {
  nb::list names;
  for (const Isa isa : kIsas)
    if (isa_runs(isa)) names.append(isa_name(isa));
  return names;
}

void set_isa(const std::string& name) {
  if (name == "auto") return unforce_isa();
  for (const Isa isa : kIsas) {
    if (name != isa_name(isa)) continue;
    if (!force_isa(isa)) refuse("isa", name + " does not run on this processor");
    return;
  }
  refuse("isa", "must be auto, scalar, avx2, avx512 or neon, is '" + name + "'");
}

void set_bf16_products(const std::string& name) {
  if (name == "auto") return unforce_bf16_products();
  for (int how = 0; how < kBf16ProductForms; ++how) {
    if (name != kBf16ProductNames[how]) continue;
    if (!force_bf16_products(static_cast<Bf16Products>(how))) refuse("name", name + " does not run on this processor");
    return;
  }
  refuse("name", "must be auto, wide, pairs, tiles, emulated or halves, is '" + name + "'");
}

void set_int8_products(const std::string& name) {
  if (name == "auto") return unforce_int8_products();
  for (int how = 0; how < kInt8ProductForms; ++how) {
    if (name != kInt8ProductNames[how]) continue;
    if (!force_int8_products(static_cast<Int8Products>(how))) refuse("name", name + " do not run on this processor");
    return;
  }
  refuse("name", "must be auto, wide, dots, tiles or emulated, is '" + name + "'");
}

nb::dict cpu_features() {
  nb::dict features;
  for (const auto& [name, present] : moelight::cpu_features()) features[name.c_str()] = present;
  return features;
}

}  // namespace
}  // namespace moelight::bind

NB_MODULE(_native, module) {
  using namespace nanobind::literals;
  using namespace moelight::bind;
  module.doc() = "moelight's native kernels; called through moelight.kernels, never directly.";
  module.def("isa", [] { return moelight::isa_name(moelight::active_isa()); });
  module.def("isa_available", isa_available);
  module.def("set_isa", set_isa, "name"_a);
  module.def("bf16_products", [] { return moelight::kBf16ProductNames[static_cast<int>(moelight::bf16_products())]; });
  module.def("set_bf16_products", set_bf16_products, "name"_a);
  module.def("int8_products", [] { return moelight::kInt8ProductNames[static_cast<int>(moelight::int8_products())]; });
  module.def("set_int8_products", set_int8_products, "name"_a);
  module.def("cpu_features", cpu_features);
  module.def("cpu_vendor", moelight::cpu_vendor);
  add_gqa(module);
  add_delta(module);
  add_ffn(module);
  add_forms(module);
  add_layer(module);
  add_mla(module);
  add_copy(module);
  add_norm(module);
  add_peaks(module);
  add_prefill(module);
  add_quantized(module);
  add_read(module);
  add_repack(module);
  add_route(module);
  add_threads(module);
}
