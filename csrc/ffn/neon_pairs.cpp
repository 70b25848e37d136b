#include "pairs_neon.h"

moelight::Kernel moelight::ffn_neon_pairs() { return pairs_kernel<ShiftedPairs>(); }
