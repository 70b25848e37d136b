#include "rows.inl"

moelight::Unpacking moelight::unpacking_halves(const Quantized& like) { return unpacking_of<Halves>(like); }
