// Unpacks to bf16 with AVX-512 and BF16, eight rows at a time where codes are transposed.

#include "lines.h"

namespace moelight {
namespace {

// What is left of a row behind whole lines.
void unpack_rest(const Quantized& q, int64_t row, int64_t first, int64_t size, void* to) {
  unpack_plainly<Bf16>(q, row, 1, first, size, 0, to, 0);
}

template <class Lines>
void unpack_rows(const Quantized& q, int64_t row, int64_t rows, int64_t first, int64_t size, int64_t lead, void* to,
                 int64_t to_bytes) {
  const int64_t whole = size / kUnpackStep * kUnpackStep;
  for (int64_t r = 0; r < rows; ++r) {
    char* out = static_cast<char*>(to) + r * to_bytes;
    Lines::lines(q, row + r, first, whole, lead, [&](__m512i line) { _mm512_storeu_si512(out, line), out += 64; });
    if (whole < size) unpack_rest(q, row + r, first + whole, size - whole, out);
  }
}

constexpr int64_t kTogether = 8;  // rows

// The words of `rows` rows (at most kTogether) of GPTQ, `count` each, as rows of words.
void turn_words(const Quantized& q, int64_t row, int64_t rows, int64_t first_word, int64_t count,
                uint8_t (*to)[kMostColumns + 32]) {
  const __m256i there =
      _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(rows)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  const uint8_t* const from = q.codes + 4 * row;
  for (int64_t j = 0; j < count; j += 8) {
    __m256i a[8], b[8], c[8];
    for (int64_t i = 0; i < 8; ++i) {
      const auto* const line = reinterpret_cast<const int*>(from + 4 * (first_word + j + i) * q.rows);
      a[i] = j + i < count ? _mm256_maskload_epi32(line, there) : _mm256_setzero_si256();
    }
    for (int i = 0; i < 8; i += 2) {
      b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]), b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
      c[i] = _mm256_unpacklo_epi64(b[i], b[i + 2]), c[i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 2]);
      c[i + 2] = _mm256_unpacklo_epi64(b[i + 1], b[i + 3]), c[i + 3] = _mm256_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to[i] + 4 * j), _mm256_permute2x128_si256(c[i], c[4 + i], 0x20));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to[4 + i] + 4 * j),
                          _mm256_permute2x128_si256(c[i], c[4 + i], 0x31));
    }
  }
}

// Whether the columns of each step of kUnpackStep share their group.
bool in_steps(const Quantized& q, int64_t first, int64_t size) {
  if (q.order == nullptr) return true;
  for (int64_t k = first; k < first + size; k += kUnpackStep)
    for (int64_t i = 1; i < kUnpackStep; ++i)
      if (q.order[k + i] != q.order[k]) return false;
  return true;
}

template <class Codes, int kBits>
void unpack_gptq(const Quantized& q, int64_t row, int64_t rows, int64_t first, int64_t size, int64_t lead, void* to,
                 int64_t to_bytes) {
  const int64_t whole = size / kUnpackStep * kUnpackStep;
  if (!in_steps(q, first, whole)) return unpack_plainly<Bf16>(q, row, rows, first, size, lead, to, to_bytes);
  for (int64_t r = 0; r < rows; r += kTogether) {
    const int64_t some = std::min(kTogether, rows - r);
    uint8_t words[kTogether][kMostColumns + 32];
    turn_words(q, row + r, some, first * kBits / 32, whole * kBits / 32, words);
    for (int64_t i = 0; i < some; ++i) {
      char* out = static_cast<char*>(to) + (r + i) * to_bytes;
      const auto store = [&](__m512i line) { _mm512_storeu_si512(out, line), out += 64; };
      const uint8_t* const codes = words[i];
      if (q.order == nullptr) {
        by_groups(q, row + r + i, first, whole, [&](int64_t k, int64_t stop, const Line& by) {
          Codes::part(codes + (k - first) * kBits / 8, stop - k, 0, by, store);
        });
      } else {
        Line by = {};
        for (int64_t k = first, last = -1; k < first + whole; k += kUnpackStep) {
          if (const int64_t group = group_of(q, k); group != last) by = line_of(q, row + r + i, last = group);
          Codes::part(codes + (k - first) * kBits / 8, kUnpackStep, 0, by, store);
        }
      }
      if (whole < size) unpack_rest(q, row + r + i, first + whole, size - whole, out);
    }
  }
}

// Rows that share the word of each column: thirty-two columns' words, the even ones and the odd ones, give every row
// its indices by a rotation.
void unpack_awq_word(const Quantized& q, int64_t row, int64_t rows, int64_t first, int64_t size, char* to,
                     int64_t to_bytes) {
  const auto words = static_cast<int>(q.rows / 8);
  const __m512i lines = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i even = _mm512_mullo_epi32(lines, _mm512_set1_epi32(words));
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(words));
  for (int64_t k = first, end = first + size; k < end;) {
    const int64_t group = k / q.group, stop = q.groups == 1 ? end : std::min(end, (group + 1) * q.group);
    __m512i tables[8];
    for (int64_t r = 0; r < rows; ++r) tables[r] = table_of(line_of(q, row + r, group));
    for (; k < stop; k += kUnpackStep) {
      const uint8_t* const from = q.codes + 4 * (k * words + row / 8);
      const __m512i a = _mm512_i32gather_epi32(even, from, 4), b = _mm512_i32gather_epi32(odd, from, 4);
      for (int64_t r = 0; r < rows; ++r) {
        const int shift = 4 * kAwqPlaces[(row + r) % 8];
        const __m512i low = _mm512_rorv_epi32(a, _mm512_set1_epi32(shift));
        const __m512i high = _mm512_rorv_epi32(b, _mm512_set1_epi32((shift + 16) % 32));
        const __m512i index = _mm512_mask_blend_epi16(0xaaaaaaaa, low, high);
        _mm512_storeu_si512(to + r * to_bytes + 2 * (k - first), look_up(index, tables[r]));
      }
    }
  }
}

void unpack_awq(const Quantized& q, int64_t row, int64_t rows, int64_t first, int64_t size, int64_t, void* to,
                int64_t to_bytes) {
  const int64_t whole = size / kUnpackStep * kUnpackStep;
  for (int64_t r = 0, some; r < rows; r += some) {
    some = std::min(rows - r, 8 - (row + r) % 8);
    char* const out = static_cast<char*>(to) + r * to_bytes;
    unpack_awq_word(q, row + r, some, first, whole, out, to_bytes);
    for (int64_t i = 0; whole < size && i < some; ++i)
      unpack_rest(q, row + r + i, first + whole, size - whole, out + i * to_bytes + 2 * whole);
  }
}

template <class Block, Packing kPacking>
constexpr Unpack kLarge = unpack_rows<LargeLines<Block, kPacking>>;

Unpack unpack_blocks(Packing packing) {
  switch (packing) {
    case Packing::kQ4_0:
      return unpack_rows<SmallLines<Packing::kQ4_0>>;
    case Packing::kQ4_1:
      return unpack_rows<SmallLines<Packing::kQ4_1>>;
    case Packing::kQ5_0:
      return unpack_rows<SmallLines<Packing::kQ5_0>>;
    case Packing::kQ5_1:
      return unpack_rows<SmallLines<Packing::kQ5_1>>;
    case Packing::kQ8_0:
      return unpack_rows<SmallLines<Packing::kQ8_0>>;
    case Packing::kQ2_K:
      return kLarge<Q2Block, Packing::kQ2_K>;
    case Packing::kQ3_K:
      return kLarge<Q3Block, Packing::kQ3_K>;
    case Packing::kQ4_K:
      return kLarge<KBlock<false>, Packing::kQ4_K>;
    case Packing::kQ5_K:
      return kLarge<KBlock<true>, Packing::kQ5_K>;
    case Packing::kQ6_K:
      return kLarge<Q6Block, Packing::kQ6_K>;
    case Packing::kIq4Nl:
      return unpack_rows<SmallLines<Packing::kIq4Nl>>;
    case Packing::kIq4Xs:
      return kLarge<Iq4Block, Packing::kIq4Xs>;
    default:
      return unpack_rows<SmallLines<Packing::kMxBlocks>>;
  }
}

}  // namespace

Unpack unpack_avx512_pairs(const Quantized& like) {
  const bool even = like.groups == 1 || like.group % kUnpackStep == 0;
  if (like.bits != 2 && even) {
    switch (like.packing) {
      case Packing::kFp8:
        return unpack_rows<Fp8Lines>;
      case Packing::kInt8:
        return unpack_rows<ByteLines<true>>;
      case Packing::kPacked:
        return like.bits == 4 ? unpack_rows<NibbleLines> : unpack_rows<ByteLines<false>>;
      case Packing::kGptq:
        return like.bits == 4 ? unpack_gptq<NibbleLines, 4> : unpack_gptq<ByteLines<false>, 8>;
      case Packing::kAwq:
        return unpack_awq;
      case Packing::kMx:
        return unpack_rows<MxLines>;
      default:
        break;
    }
  }
  return in_blocks(like.packing) ? unpack_blocks(like.packing) : unpack_to(DType::kBFloat16);
}

}  // namespace moelight
