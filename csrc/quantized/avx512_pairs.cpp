#include "moelight/cpu.h"
#include "rows.inl"

moelight::Unpacking moelight::unpacking_pairs(const Quantized& like) {
  return permutes_bytes() ? unpacking_bytes(like) : unpacking_of<Pairs>(like);
}
