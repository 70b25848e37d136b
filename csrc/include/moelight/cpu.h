// What the processor can do, and which instruction set the kernels use. Knows no kernel.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace moelight {

enum class Isa : int { kScalar = 0, kAvx2 = 1, kAvx512 = 2 };

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

// Chooses for the whole process. False, and no change, when `isa` does not run here.
bool force_isa(Isa isa);
void unforce_isa();

// Whether kernels may use AVX512_BF16 beside the instruction set in force: they may where the processor has it and that
// set is kAvx512, unless told otherwise.
bool active_bf16();
void allow_bf16(bool allowed);

// Whether the processor has AVX512_VNNI.
bool has_vnni();

}  // namespace moelight
