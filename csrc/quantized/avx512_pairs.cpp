#include "rows.inl"

moelight::Unpacking moelight::unpacking_pairs(const Quantized& like) { return unpacking_of<Pairs>(like); }
