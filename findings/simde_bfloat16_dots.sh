#!/usr/bin/env bash
# SIMDe 0.8.2 (the source package simde-py), dot products of bfloat16 pairs (AVX512_BF16), which kernels of experts and attention are
# made of: SIMDe is used to run such kernels where the processor lacks them. By its name one would expect the bits of VDPBF16PS.
# Intel documents for it: subnormal numbers count as zero, whatever MXCSR says, and the product of the odd elements is added to
# the sum by a fused operation, then that of the even ones. SIMDe keeps subnormals, adds both products first, and rounds each
# step: 1 becomes 0, and 0 becomes 2^-130. Exits non-zero if that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
address=https://files.pythonhosted.org/packages/6d/53/5d46f64168c67597f657f3edb7ae94b7cda0fefe2db2a15568f03f70a673
curl -sSfo "$folder/simde.tar.gz" "$address/simde_py-0.8.2.post1.tar.gz"
echo "d7eebe0728d44a5e1fef186ed7810407465e835a2ead45ce0c22eefadd66dbf6  $folder/simde.tar.gz" | sha256sum -c --quiet
tar -xzf "$folder/simde.tar.gz" -C "$folder"
cat > "$folder/dots.c" <<'C'
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "simde/x86/avx512/dpbf16.h"
#include "simde/x86/avx512/set1.h"

static simde__m512bh pairs(uint16_t even, uint16_t odd) {
  uint16_t items[32];
  for (int i = 0; i < 32; i += 2) items[i] = even, items[i + 1] = odd;
  simde__m512bh result;
  memcpy(&result, items, sizeof result);
  return result;
}

static float first(float sum, simde__m512bh a, simde__m512bh b) {
  float items[16];
  const simde__m512 result = simde_mm512_dpbf16_ps(simde_mm512_set1_ps(sum), a, b);
  memcpy(items, &result, sizeof items);
  return items[0];
}

int main(void) {
  const uint16_t one = 0x3f80, two_to_24 = 0x4b80, subnormal = 0x0008;  // 2^-130
  const float order = first(-16777216.0f, pairs(two_to_24, one), pairs(one, one));
  const float small = first(0.0f, pairs(subnormal, 0), pairs(one, one));
  printf("-2^24 + 2^24 + 1: the processor 1, SIMDe %g; 2^-130: the processor 0, SIMDe %g\n", order, small);
  return !(order == 0.0f && small == ldexpf(1.0f, -130));
}
C
headers=$(dirname "$(find "$folder" -path '*simde/x86' -type d | head -n 1)")
gcc -O1 -w -Wno-psabi -mavx2 -mfma -I"$(dirname "$headers")" "$folder/dots.c" -lm -o "$folder/dots"
"$folder/dots"
