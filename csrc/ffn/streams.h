// Forms in which weights stream past few tokens (stream.inl). Results of all forms are the same to the bit, so the
// choice is one of time alone, and may be measured.
#pragma once

#include <cstdint>

namespace moelight {

// How many rows are read side by side (0: the tiles of dots.inl), and how many bytes ahead memory is asked for;
// `second`: into the second-level cache even where the first holds it beside the tokens.
struct StreamForm {
  const char* name;
  int64_t rows, lead;
  bool second;
};

inline constexpr StreamForm kStreamForms[] = {
    {"tiles", 0, 0, false},
    {"1 row", 1, 0, false},
    {"1 row, 4 KiB ahead into L1", 1, 4 << 10, false},
    {"1 row, 8 KiB ahead into L2", 1, 8 << 10, true},
    {"4 rows, 8 KiB ahead into L1", 4, 8 << 10, false},
    {"4 rows, 16 KiB ahead into L2", 4, 16 << 10, true},
};
inline constexpr int kStreamFormCount = sizeof kStreamForms / sizeof *kStreamForms;

// Where nothing has been measured, of all sizes: with a first-level cache of 48 KiB (Zen 5) and of 32 (Zen 4).
inline constexpr int64_t kLargeNear = 48 << 10;
inline constexpr int kFormOfLargeNear = 2, kFormOfSmallNear = 5;

// Numbers of tokens that have a form each; those between them have the next larger one's.
inline constexpr int64_t kStreamTokenCounts[] = {1, 2, 4};
inline constexpr int kStreamSizes = 3;

// For a size, by its place in kStreamTokenCounts.
int stream_form(int size);
// Whether the form of most tokens asks for the second-level cache: then more tokens do, too.
inline bool asks_second() { return kStreamForms[stream_form(kStreamSizes - 1)].second; }
void set_stream_form(int size, int form);

}  // namespace moelight
