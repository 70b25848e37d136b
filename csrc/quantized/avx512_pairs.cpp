#include "moelight/cpu.h"
#include "rows.inl"

moelight::Unpacking moelight::unpacking_pairs(const Quantized& like) {
  const Unpacking found = unpacking_of<Pairs>(like);
  const bool nibbles = like.packing == Packing::kPacked && like.bits == 4 && found.one != nullptr;
  return nibbles && permutes_bytes() ? unpacking_nibbles() : found;
}
