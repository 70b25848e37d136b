#include "numbers.h"

moelight::Unpack moelight::unpack_avx512_pairs(const Quantized&) { return unpack_to(DType::kBFloat16); }
