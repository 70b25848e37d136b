// Stands in for the functions of instruction sets that this build leaves out (native.cmake). They are never called:
// cpu.cpp says that those sets do not run.

#include <cstdlib>

#include "delta/delta.h"
#include "ffn/ffn.h"
#include "gqa/gqa.h"
#include "mla/mla.h"
#include "norm/norm.h"
#include "peaks/peaks.h"
#include "prefill/prefill.h"
#include "quantized/quantized.h"
#include "route/route.h"

namespace moelight {

#define MOELIGHT_ABSENT(declaration) \
  declaration { std::abort(); }

#ifdef MOELIGHT_WITHOUT_AVX2
MOELIGHT_ABSENT(const DeltaKernels& delta_avx2())
MOELIGHT_ABSENT(Kernel ffn_avx2(DType, WeightType))
MOELIGHT_ABSENT(Kernel ffn_avx2_pairs(WeightType))
MOELIGHT_ABSENT(const GqaKernels& gqa_avx2())
MOELIGHT_ABSENT(Kernel integers_avx2(DType))
MOELIGHT_ABSENT(const MlaKernels& mla_avx2())
MOELIGHT_ABSENT(const NormKernels& norm_avx2())
MOELIGHT_ABSENT(const PrefillKernels& prefill_avx2())
MOELIGHT_ABSENT(ProductUnit product_avx2())
MOELIGHT_ABSENT(const ScatterKernels& scatter_avx2())
MOELIGHT_ABSENT(Unpack unpack_avx2(DType))
#endif

#ifdef MOELIGHT_WITHOUT_AVX512
MOELIGHT_ABSENT(const DeltaKernels& delta_avx512())
MOELIGHT_ABSENT(Kernel ffn_avx512(DType, WeightType))
MOELIGHT_ABSENT(const GqaKernels& gqa_avx512())
MOELIGHT_ABSENT(Kernel integers_avx512(DType))
MOELIGHT_ABSENT(const MlaKernels& mla_avx512())
MOELIGHT_ABSENT(const NormKernels& norm_avx512())
MOELIGHT_ABSENT(const PrefillKernels& prefill_avx512())
MOELIGHT_ABSENT(ProductUnit product_avx512())
MOELIGHT_ABSENT(const ScatterKernels& scatter_avx512())
MOELIGHT_ABSENT(Unpack unpack_avx512(DType))
#endif

#ifdef MOELIGHT_WITHOUT_AVX512_BF16
MOELIGHT_ABSENT(Kernel ffn_avx512_dots(WeightType))
MOELIGHT_ABSENT(Kernel ffn_avx512_halves(WeightType))
MOELIGHT_ABSENT(const GqaKernels& gqa_avx512_bf16())
MOELIGHT_ABSENT(const PrefillKernels& prefill_avx512_bf16())
MOELIGHT_ABSENT(ProductUnit product_avx512_bf16())
#elif defined(MOELIGHT_WITHOUT_AVX512_VBMI)
MOELIGHT_ABSENT(Unpacking unpacking_bytes(const Quantized&))
#endif

#ifdef MOELIGHT_WITHOUT_AVX512_VNNI
MOELIGHT_ABSENT(Kernel integers_avx512_vnni(DType))
MOELIGHT_ABSENT(ProductUnit product_avx512_vnni())
#endif

#ifdef MOELIGHT_WITHOUT_AVX_VNNI
MOELIGHT_ABSENT(Kernel integers_avx_vnni(DType))
MOELIGHT_ABSENT(ProductUnit product_avx_vnni())
#endif

#ifdef MOELIGHT_WITHOUT_AMX
MOELIGHT_ABSENT(Kernel ffn_amx(WeightType))
MOELIGHT_ABSENT(Kernel integers_amx(DType))
MOELIGHT_ABSENT(const MlaKernels& mla_amx())
MOELIGHT_ABSENT(const PrefillKernels& prefill_amx())
MOELIGHT_ABSENT(ProductUnit product_amx())
MOELIGHT_ABSENT(ProductUnit product_amx_int8())
#endif

#ifdef MOELIGHT_WITHOUT_EMULATED
MOELIGHT_ABSENT(Kernel ffn_emulated(WeightType))
MOELIGHT_ABSENT(Kernel integers_emulated(DType))
MOELIGHT_ABSENT(const MlaKernels& mla_emulated())
MOELIGHT_ABSENT(const PrefillKernels& prefill_emulated())
#endif

}  // namespace moelight
