#include "rows.inl"

moelight::Unpacking moelight::unpacking_bytes(const Quantized& like) { return unpacking_of<Pairs>(like); }
