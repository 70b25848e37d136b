// Products of int8 tokens with unsigned codes in tiles of int32 sums: how parts of any length are cut. Internal
// linkage.
//
// Tiles 0 and 1 are sums of sixteen tokens (their rows) with sixteen rows of codes each (their words). The others hold
// tokens and codes of some columns: kPieces, with a pair of tiles for each.
#pragma once

#include <cstdint>

namespace moelight {
namespace {

constexpr int64_t kPieces[] = {64, 32, 16};  // columns
constexpr int64_t kCodesBytes = 128;         // from four columns of 32 rows to the next

// Columns of tile `kTile`, which is of tokens or codes.
constexpr int64_t tile_columns(int tile) { return kPieces[tile / 2 - 1]; }

// The two sums += tokens, x_bytes apart, times codes, of one piece.
template <class T, int kPiece>
inline __attribute__((always_inline)) void multiply_piece(const char*& x, int64_t x_bytes, const uint8_t*& codes) {
  constexpr int kTokens = 2 + 2 * kPiece, kCodes = kTokens + 1;
  T::template load<kTokens>(x, x_bytes);
  T::template load<kCodes>(codes, kCodesBytes);
  T::template multiply_add<0, kTokens, kCodes>();
  T::template load<kCodes>(codes + 64, kCodesBytes);
  T::template multiply_add<1, kTokens, kCodes>();
  x += kPieces[kPiece], codes += kPieces[kPiece] / 4 * kCodesBytes;
}

// to [16][32] = tokens [16, columns] times codes [columns / 4][32][4]. Both can be read to the next multiple of 32
// columns, where tokens are zero.
template <class T>
void multiply_part(const char* x, int64_t x_bytes, const uint8_t* codes, int64_t columns, int32_t* to) {
  T::template zero<0>(), T::template zero<1>();
  for (; columns >= kPieces[0]; columns -= kPieces[0]) multiply_piece<T, 0>(x, x_bytes, codes);
  if (columns > kPieces[2]) multiply_piece<T, 1>(x, x_bytes, codes), columns -= kPieces[1];
  if (columns > kPieces[2]) multiply_piece<T, 1>(x, x_bytes, codes), columns -= kPieces[1];
  if (columns > 0) multiply_piece<T, 2>(x, x_bytes, codes);
  T::template store<0>(to), T::template store<1>(to + 16);
}

}  // namespace
}  // namespace moelight
