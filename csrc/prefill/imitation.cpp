#include "tiles/imitation.h"

#include "kernel.inl"
#include "tiles.h"

const moelight::PrefillKernels& moelight::prefill_imitation() { return kernels<PrefillAvx512, Tiles<ImitatedTile>>(); }
