#include "moelight/cpu.h"

#include <atomic>
#include <cstdint>

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__x86_64__)
#include <cpuid.h>
#define MOELIGHT_X86 1
#else
#define MOELIGHT_X86 0
#endif

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace moelight {
namespace {

struct Features {
  bool avx2 = false, fma = false, f16c = false, avx512f = false, avx512bw = false, avx512dq = false, avx512vl = false,
       avx512_bf16 = false, avx512_vbmi = false, avx512_vnni = false, avx_vnni = false, amx_tile = false,
       amx_bf16 = false, amx_int8 = false, neon = false, dotprod = false, i8mm = false, bf16 = false;
};

#if MOELIGHT_X86
uint64_t saved_register_state() {
  uint32_t low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

Features detect() {
  Features features;
  uint32_t a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return features;
  const bool osxsave = (c >> 27) & 1;
  if (!osxsave) return features;
  const uint64_t saved = saved_register_state();
  const bool ymm = (saved & 0x6) == 0x6, zmm = (saved & 0xe6) == 0xe6, tiles = (saved & 0x60000) == 0x60000;
  features.fma = ymm && ((c >> 12) & 1);
  features.f16c = ymm && ((c >> 29) & 1);
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return features;
  features.avx2 = ymm && ((b >> 5) & 1);
  features.avx512f = zmm && ((b >> 16) & 1);
  features.avx512dq = zmm && ((b >> 17) & 1);
  features.avx512bw = zmm && ((b >> 30) & 1);
  features.avx512vl = zmm && ((b >> 31) & 1);
  features.avx512_vbmi = zmm && ((c >> 1) & 1);
  features.avx512_vnni = zmm && ((c >> 11) & 1);
  features.amx_bf16 = tiles && ((d >> 22) & 1);
  features.amx_tile = tiles && ((d >> 24) & 1);
  features.amx_int8 = tiles && ((d >> 25) & 1);
  if (a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) {
    features.avx512_bf16 = zmm && ((a >> 5) & 1);
    features.avx_vnni = ymm && ((a >> 4) & 1);
  }
  return features;
}
#elif defined(__aarch64__) && defined(__linux__)
Features detect() {
  const unsigned long first = getauxval(AT_HWCAP), second = getauxval(AT_HWCAP2);
  Features features;
  features.neon = (first >> 1) & 1;
  features.dotprod = (first >> 20) & 1;
  features.i8mm = (second >> 13) & 1;
  features.bf16 = (second >> 14) & 1;
  return features;
}
#elif defined(__aarch64__) && defined(__APPLE__)
bool told(const char* name) {
  int value = 0;
  size_t bytes = sizeof value;
  return sysctlbyname(name, &value, &bytes, nullptr, 0) == 0 && value != 0;
}

Features detect() {
  Features features;
  features.neon = true;
  features.dotprod = told("hw.optional.arm.FEAT_DotProd");
  features.i8mm = told("hw.optional.arm.FEAT_I8MM");
  features.bf16 = told("hw.optional.arm.FEAT_BF16");
  return features;
}
#else
Features detect() { return {}; }
#endif

// Without what this build leaves out (native.cmake).
Features compiled(Features features) {
#ifdef MOELIGHT_WITHOUT_AVX512
  features.avx512f = false;
#endif
#ifdef MOELIGHT_WITHOUT_AVX512_BF16
  features.avx512_bf16 = false;
#endif
#ifdef MOELIGHT_WITHOUT_AVX512_VBMI
  features.avx512_vbmi = false;
#endif
#ifdef MOELIGHT_WITHOUT_AVX512_VNNI
  features.avx512_vnni = false;
#endif
#ifdef MOELIGHT_WITHOUT_AVX_VNNI
  features.avx_vnni = false;
#endif
#ifdef MOELIGHT_WITHOUT_AMX
  features.amx_tile = features.amx_bf16 = features.amx_int8 = false;
#endif
  return features;
}

#ifdef MOELIGHT_WITHOUT_AVX2
constexpr bool kAvx2Compiled = false;
#else
constexpr bool kAvx2Compiled = true;
#endif
#ifdef MOELIGHT_WITHOUT_EMULATED
constexpr bool kEmulatedCompiled = false;
#else
constexpr bool kEmulatedCompiled = true;
#endif

const Features& features() {
  static const Features features = compiled(detect());
  return features;
}

Isa best_isa() {
  if (isa_runs(Isa::kAvx512)) return Isa::kAvx512;
  if (isa_runs(Isa::kAvx2)) return Isa::kAvx2;
  if (isa_runs(Isa::kNeon)) return Isa::kNeon;
  return Isa::kScalar;
}

constexpr int kNotForced = -1;
std::atomic<int> forced{kNotForced};
std::atomic<int> forced_products{kNotForced};
std::atomic<int> forced_int8{kNotForced};

// The system lends the registers of tiles to those who ask, once for the whole process.
bool tiles_permitted() {
#if MOELIGHT_X86 && defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

bool products_run(Bf16Products how) {
  static const Features& f = features();
  static const bool pairs = isa_runs(Isa::kAvx512) && f.avx512_bf16 && f.avx512_vnni;
  static const bool tiles = pairs && f.amx_tile && f.amx_bf16 && tiles_permitted();
  switch (how) {
    case Bf16Products::kTiles:
      return tiles;
    case Bf16Products::kPairs:
      return pairs || f.bf16;
    case Bf16Products::kEmulated:
      return kEmulatedCompiled && pairs;
    case Bf16Products::kHalves:
      return pairs;
    case Bf16Products::kWide:
      break;
  }
  return true;
}

bool int8_runs(Int8Products how, Isa isa) {
  const Features& f = features();
  static const bool tiles = f.avx512_vnni && f.amx_tile && f.amx_int8 && tiles_permitted();
  switch (how) {
    case Int8Products::kDots:
      return (isa == Isa::kAvx512 && f.avx512_vnni) || (isa == Isa::kAvx2 && f.avx_vnni) ||
             (isa == Isa::kNeon && f.dotprod);
    case Int8Products::kTiles:
      return isa == Isa::kAvx512 && tiles;
    case Int8Products::kEmulated:
      return kEmulatedCompiled && isa == Isa::kAvx512 && f.avx512_vnni;
    case Int8Products::kWide:
      break;
  }
  return true;
}

}  // namespace

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kNeon:
      return "neon";
    case Isa::kScalar:
      break;
  }
  return "scalar";
}

std::string cpu_vendor() {
#if MOELIGHT_X86
  uint32_t a = 0, letters[3] = {0, 0, 0};
  if (!__get_cpuid(0, &a, &letters[0], &letters[2], &letters[1])) return "";
  return std::string(reinterpret_cast<const char*>(letters), sizeof(letters));
#else
  return "";
#endif
}

std::vector<std::pair<std::string, bool>> cpu_features() {
  const Features& f = features();
  return {{"avx2", f.avx2},
          {"fma", f.fma},
          {"f16c", f.f16c},
          {"avx512f", f.avx512f},
          {"avx512bw", f.avx512bw},
          {"avx512dq", f.avx512dq},
          {"avx512vl", f.avx512vl},
          {"avx512_bf16", f.avx512_bf16},
          {"avx512_vbmi", f.avx512_vbmi},
          {"avx512_vnni", f.avx512_vnni},
          {"avx_vnni", f.avx_vnni},
          {"amx_tile", f.amx_tile},
          {"amx_bf16", f.amx_bf16},
          {"amx_int8", f.amx_int8},
          {"neon", f.neon},
          {"dotprod", f.dotprod},
          {"i8mm", f.i8mm},
          {"bf16", f.bf16}};
}

bool isa_runs(Isa isa) {
  const Features& f = features();
  switch (isa) {
    case Isa::kAvx512:
      return MOELIGHT_X86 && f.avx2 && f.fma && f.f16c && f.avx512f && f.avx512bw && f.avx512dq && f.avx512vl;
    case Isa::kAvx2:
      return MOELIGHT_X86 && kAvx2Compiled && f.avx2 && f.fma && f.f16c;
    case Isa::kNeon:
      return f.neon;
    case Isa::kScalar:
      break;
  }
  return true;
}

Isa active_isa() {
  static const Isa best = best_isa();
  const int choice = forced.load(std::memory_order_relaxed);
  return choice == kNotForced ? best : static_cast<Isa>(choice);
}

bool force_isa(Isa isa) {
  if (!isa_runs(isa)) return false;
  forced.store(static_cast<int>(isa), std::memory_order_relaxed);
  return true;
}

void unforce_isa() { forced.store(kNotForced, std::memory_order_relaxed); }

Bf16Products bf16_products() {
  static const bool halves = cpu_vendor() == "GenuineIntel";
  static const Bf16Products best = products_run(Bf16Products::kTiles)    ? Bf16Products::kTiles
                                   : !products_run(Bf16Products::kPairs) ? Bf16Products::kWide
                                   : halves                              ? Bf16Products::kHalves
                                                                         : Bf16Products::kPairs;
  if (active_isa() != Isa::kAvx512 && active_isa() != Isa::kNeon) return Bf16Products::kWide;
  const int choice = forced_products.load(std::memory_order_relaxed);
  return choice == kNotForced ? best : static_cast<Bf16Products>(choice);
}

bool force_bf16_products(Bf16Products how) {
  if (!products_run(how)) return false;
  forced_products.store(static_cast<int>(how), std::memory_order_relaxed);
  return true;
}

void unforce_bf16_products() { forced_products.store(kNotForced, std::memory_order_relaxed); }
bool bf16_products_forced() { return forced_products.load(std::memory_order_relaxed) != kNotForced; }
bool bf16_products_run(Bf16Products how) { return products_run(how); }

Int8Products int8_products() {
  const Isa isa = active_isa();
  const int choice = forced_int8.load(std::memory_order_relaxed);
  if (choice != kNotForced && int8_runs(static_cast<Int8Products>(choice), isa))
    return static_cast<Int8Products>(choice);
  for (const auto how : {Int8Products::kTiles, Int8Products::kDots})
    if (int8_runs(how, isa)) return how;
  return Int8Products::kWide;
}

bool force_int8_products(Int8Products how) {
  bool runs = how == Int8Products::kWide;
  for (const Isa isa : {Isa::kAvx2, Isa::kAvx512, Isa::kNeon}) runs = runs || (isa_runs(isa) && int8_runs(how, isa));
  if (!runs) return false;
  forced_int8.store(static_cast<int>(how), std::memory_order_relaxed);
  return true;
}

void unforce_int8_products() { forced_int8.store(kNotForced, std::memory_order_relaxed); }
bool int8_products_forced() { return forced_int8.load(std::memory_order_relaxed) != kNotForced; }
bool int8_products_run(Int8Products how) { return int8_runs(how, active_isa()); }

bool permutes_bytes() { return features().avx512_vbmi; }

bool mixes_signs() { return features().i8mm; }

int64_t near_cache_bytes() {
#if defined(_SC_LEVEL1_DCACHE_SIZE)
  static const int64_t bytes = ::sysconf(_SC_LEVEL1_DCACHE_SIZE);
  if (bytes > 0) return bytes;
#endif
  return 32 << 10;
}

}  // namespace moelight
