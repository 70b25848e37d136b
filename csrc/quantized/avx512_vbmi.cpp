#include "rows.inl"

moelight::Unpacking moelight::unpacking_nibbles() { return kRows<Pairs, Nibbles<Pairs>>; }
