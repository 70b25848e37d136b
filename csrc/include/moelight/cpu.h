// What the processor can do, and which instruction set the kernels use. Does not depend on kernels.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace moelight {

enum class Isa : int { kScalar = 0, kAvx2 = 1, kAvx512 = 2, kNeon = 3 };

const char* isa_name(Isa isa);

// Name and presence of every feature that some kernel, now or later, may ask for. A feature counts only when the
// operating system saves its registers too.
std::vector<std::pair<std::string, bool>> cpu_features();

// Who made the processor, as cpuid spells it ("AuthenticAMD"); empty where there is no cpuid.
std::string cpu_vendor();

// True when this build contains code for `isa` and this processor runs it.
bool isa_runs(Isa isa);

// The instruction set in force: the best that runs, unless force_isa chose another.
Isa active_isa();

// Of the functions `family`_scalar, `family`_avx2 and so on, of which each architecture has its own: that in force.
#if defined(__x86_64__)
#define MOELIGHT_ACTIVE(family) \
  (active_isa() == Isa::kAvx512 ? family##_avx512 : active_isa() == Isa::kAvx2 ? family##_avx2 : family##_scalar)
#elif defined(__aarch64__)
#define MOELIGHT_ACTIVE(family) (active_isa() == Isa::kNeon ? family##_neon : family##_scalar)
#else
#define MOELIGHT_ACTIVE(family) family##_scalar
#endif

// Chooses for the whole process. False, and no change, when `isa` does not run here.
bool force_isa(Isa isa);
void unforce_isa();

// How bf16 is multiplied under kAvx512 or kNeon: widened to float32, in pairs (AVX512_BF16, and AVX512_VNNI for
// integers; under kNeon Arm's BF16), or under kAvx512 alone in
// tiles (AMX), in emulated tiles, which let any processor with pairs test what is written for tiles, or with the sums
// of pairs where two products of float32 take less time than one of pairs: on Intel's processors.
enum class Bf16Products : int { kWide = 0, kPairs = 1, kTiles = 2, kEmulated = 3, kHalves = 4 };
inline constexpr int kBf16ProductForms = 5;
inline constexpr const char* kBf16ProductNames[] = {"wide", "pairs", "tiles", "emulated", "halves"};

// The way in force: the best that runs, unless force_bf16_products chose another; kWide under any other set.
Bf16Products bf16_products();

// Chooses for the whole process. False, and no change, when `how` does not run here.
bool force_bf16_products(Bf16Products how);
void unforce_bf16_products();
bool bf16_products_forced();
bool bf16_products_run(Bf16Products how);

// How int8 is multiplied: as words, four at a time (AVX_VNNI, AVX512_VNNI, Arm's dotprod), or under kAvx512 many tokens
// in tiles (AMX) or in emulated tiles, which let any processor with AVX512_VNNI test what is written for tiles.
enum class Int8Products : int { kWide = 0, kDots = 1, kTiles = 2, kEmulated = 3 };
inline constexpr int kInt8ProductForms = 4;
inline constexpr const char* kInt8ProductNames[] = {"wide", "dots", "tiles", "emulated"};

// The way in force: the best that runs under the active set, unless force_int8_products chose another that runs there.
Int8Products int8_products();

// Chooses for the whole process. False, and no change, when `how` does not run here.
bool force_int8_products(Int8Products how);
void unforce_int8_products();
bool int8_products_forced();
bool int8_products_run(Int8Products how);  // under the active set

// Whether bytes of a vector can be put in any order by one instruction (AVX512_VBMI).
bool permutes_bytes();

// Whether unsigned bytes are multiplied by signed ones, four at a time (Arm's I8MM).
bool mixes_signs();

// Bytes of the first-level data cache of one core; 32 KiB where the system does not say.
int64_t near_cache_bytes();

}  // namespace moelight
