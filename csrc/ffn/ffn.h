// Linear layers and expert feed-forward over weights as the checkpoint has them: what goes in, and the face between
// the driver and an instruction set.
//
// Legend: T tokens, N rows of a weight, K its columns ("depth"), E experts, H hidden, I intermediate.
//
// The result of one (token, row) is a sum over K in an order that K and the kernel alone decide (kernel.inl, dots.inl,
// tiles.h say which), in float32; then comes the bias, then the rounding to the type of x. Nothing else has any
// influence: not the other tokens, nor how the work is cut, nor the number of threads.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>

#include "moelight/half.h"
#include "quantized/quantized.h"

namespace moelight {

enum class WeightType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kQuantized = 3 };

enum class Curve : int { kSilu = 0, kGelu = 1, kGeluTanh = 2, kSquaredRelu = 3 };

// curve(gate) (up + shift), or the curve alone where there is no gate: gate at most `limit` (`late`: its curve), up
// within +-limit, silu(x) = x sigmoid(alpha x).
struct Activation {
  Curve curve = Curve::kSilu;
  float alpha = 1.0f, limit = std::numeric_limits<float>::infinity(), shift = 0.0f;
  bool late = false;

  // Neither limits nor shift: what most models have.
  bool plain() const {
    return alpha == 1.0f && shift == 0.0f && limit == std::numeric_limits<float>::infinity() && !late;
  }
};

// How gate and up are given: two weights; one whose rows are interleaved; or up alone.
enum class Pairing : int { kApart = 0, kInterleaved = 1, kUngated = 2 };

// A Quantized matrix: its tiles are unpacked to what the lanes multiply, and meet the kernels of that type.
struct Unpacked {};

// What the weights of one product have in common.
struct Format {
  WeightType type;
  int64_t rows, depth;
  DType bias_type;
  bool transposed = false;  // floats alone: the weight lies as [depth, rows]
  bool integers = false;    // of kQuantized: tokens are rounded to int8, and meet the codes (integers.inl)
};

struct Weight {
  const void* data;   // [rows, depth], or transposed [depth, rows]; null for an expert that is not there
  int64_t row_bytes;  // from one line of these to the next
  const void* bias;   // [rows] or null
  // Of kQuantized: the matrix, of which the rows from `first_row` on are meant; data and row_bytes are those of its
  // codes, or without data where these are transposed.
  const Quantized* quantized = nullptr;
  int64_t first_row = 0;

  bool present() const { return data != nullptr || quantized != nullptr; }
};

// Rows of activations, of the type of x; strides in elements.
struct Tokens {
  DType type;
  int64_t count;
  const void* x;
  int64_t x_stride;
  void* out;
  int64_t out_stride;
};

struct LinearArgs {
  Tokens tokens;
  Format format;
  Weight weight;
  int threads;
};

void linear(const LinearArgs& args);

struct ExpertArgs {
  Tokens tokens;           // [T, H] sorted by expert -> [T, H]; out may be x
  const int32_t* offsets;  // [E + 1], rising from 0 to T
  int64_t experts;
  Activation activation;
  Pairing pairing;
  Format up_format, down_format;
  std::optional<Format> gate_format;  // where gates are stored otherwise than ups
  const Weight* gate;                 // [E] of [I, H]; null unless kApart
  const Weight* up;                   // [E] of [I, H], or [2I, H] if kInterleaved, a row of the gate first
  const Weight* down;                 // [E] of [H, I]
  int threads;
};

void expert_ffn(const ExpertArgs& args);

// The most that a call with these sizes leaves allocated for the thread that makes it; every call needs what its
// largest predecessor needed, and no more. `twice`: gates and ups are stored in two formats, for each of which tokens
// are rounded by themselves.
int64_t expert_ffn_workspace(DType x, const Format& up, const Format& down, bool twice, int64_t tokens, int64_t experts,
                             int threads);
int64_t linear_workspace(DType x, const Format& format, int64_t tokens, int threads);

// What the calling thread's calls have left allocated so far.
int64_t ffn_workspace_kept();

// ---------------------------------------------------------------------------------------------------------------------

// Tokens and rows that one thread multiplies at a time. They shape the work, not the result.
constexpr int64_t kTokenBlock = 96;
constexpr int64_t kUnitRows = 128;
constexpr int64_t kUpColumn = kUnitRows / 2;  // where the sums of up rows begin beside those of their gates

// Some rows of a weight times some tokens. Of a transposed weight rows may be more than kUnitRows: their sums are then
// block after block of so many, each of `tokens` lines.
struct Product {
  const char* weight;  // the first of the rows
  int64_t row_bytes;
  int64_t rows, depth;  // at most kUnitRows rows
  const char* x;        // prepared tokens, x_bytes apart
  int64_t x_bytes, tokens;
  const char* next;  // what is read afterwards, in rows next_bytes apart, that it may be fetched; or null
  int64_t next_bytes;
  const Quantized* quantized = nullptr;  // of kQuantized: `weight` is null or the codes of `first_row`
  int64_t first_row = 0;
  Unpacking unpacking = {};
  bool continued = false;                     // sums of Kernel::by_rows go on
  const Quantized* next_quantized = nullptr;  // what `next` is part of, from the row `next_row` on
  int64_t next_row = 0;

  // From the codes of a row to those read `ahead` rows later; 0: nothing is fetched.
  int64_t lead_of(int64_t row, int64_t ahead) const {
    if (weight == nullptr) return 0;
    if (row + ahead < rows) return ahead * row_bytes;
    return next == nullptr ? 0 : next + (row + ahead - rows) * next_bytes - (weight + row * row_bytes);
  }
  // Asks memory for the scales of `count` rows that are read `ahead` rows after a row.
  void fetch_scales(int64_t row, int64_t ahead, int64_t count) const {
    if (row + ahead < rows) {
      moelight::fetch_scales(*quantized, first_row + row + ahead, count);
    } else if (next_quantized != nullptr) {
      moelight::fetch_scales(*next_quantized, next_row + row + ahead - rows, count);
    }
  }
};

// What an instruction set provides for activations of one type and weights of one type.
struct Kernel {
  int64_t step;           // what a prepared token holds is padded with zeros to a multiple of this
  int64_t element_bytes;  // of a prepared token
  int64_t gap_bytes;      // after the elements of one, so that many do not share cache sets
  int64_t token_step;     // prepared tokens come in multiples of this, the last ones zero
  bool in_place;          // a token of which the step is a divisor is as good as prepared
  int64_t scratch_bytes;  // of `multiply`
  // sums[t][r] += x[t] . weight[r], sums kUnitRows apart and zero before; scratch aligned to 64 bytes. Of `by_rows`
  // sums[r][t] = x[t] . weight[r], kTokenBlock apart, or += where the product is continued.
  void (*multiply)(const Product&, void* scratch, float* sums);
  // The same with a transposed weight; null: it is turned, part by part, into rows for `multiply`.
  void (*multiply_transposed)(const Product&, void* scratch, float* sums);
  // Where there is no multiply_transposed: `count` (at most kUnitRows) columns of `depth` lines, as rows row_bytes
  // apart.
  void (*turn)(const char* from, int64_t line_bytes, int64_t count, int64_t depth, char* to, int64_t row_bytes);
  // `count` rows of x, x_bytes apart, to prepared ones and zero ones up to the next multiple of the token step.
  void (*prepare)(const void* x, int64_t x_bytes, int64_t count, int64_t depth, void* out);
  // sums + bias, rounded to the type of x; rows of out are `stride` elements apart.
  void (*store)(const float* sums, const float* bias, int64_t rows, int64_t tokens, void* out, int64_t stride);
  // The activation of `columns` gates and ups, rounded to the type of x. kInterleaved: sums and bias hold both so;
  // kUngated: sums and bias are those of up.
  void (*activate)(const Activation&, Pairing, const float* sums, const float* ups, const float* bias,
                   const float* up_bias, int64_t columns, int64_t tokens, void* out, int64_t stride);
  // Of kQuantized: what is done with matrices like one.
  Unpacking (*unpacking)(const Quantized& like) = nullptr;
  // Instead of `prepare`, where tokens are rounded to meet matrices like one.
  void (*quantise)(const Quantized& like, const void* x, int64_t x_bytes, int64_t count, void* out,
                   int64_t out_bytes) = nullptr;
  bool by_rows = false;  // a sum of a row lies beside the next token's, where `store` and `activate` take it
  // As `activate`, to tokens that are prepared as `prepare` does, blocks of the token step `stride` bytes apart; or
  // null.
  void (*activate_prepared)(const Activation&, Pairing, const float* sums, const float* ups, const float* bias,
                            const float* up_bias, int64_t columns, int64_t tokens, void* out, int64_t stride) = nullptr;
};

Kernel ffn_scalar(DType x, WeightType weight);
Kernel ffn_avx2(DType x, WeightType weight);
Kernel ffn_avx512(DType x, WeightType weight);
Kernel ffn_neon(DType x, WeightType weight);
// bfloat16 x alone, and no float32, float16 or transposed weights.
Kernel ffn_avx2_pairs(WeightType weight);
// bfloat16 x alone, and no float32 or float16 weights.
Kernel ffn_avx512_dots(WeightType weight);
Kernel ffn_avx512_halves(WeightType weight);
Kernel ffn_amx(WeightType weight);
Kernel ffn_emulated(WeightType weight);  // of ffn_amx, for processors with AVX512_BF16 but without tiles
// bfloat16 x, and bfloat16 weights that are not transposed, or quantised ones; both give the same results.
Kernel ffn_neon_pairs();
Kernel ffn_neon_bf16();

// Of formats with `integers`: all give the same results.
Kernel integers_scalar(DType x);
Kernel integers_avx2(DType x);
Kernel integers_avx_vnni(DType x);
Kernel integers_avx512(DType x);
Kernel integers_avx512_vnni(DType x);
Kernel integers_neon(DType x);
Kernel integers_neon_dots(DType x);
Kernel integers_neon_i8mm(DType x);
Kernel integers_amx(DType x);
Kernel integers_emulated(DType x);  // of integers_amx, for processors with AVX512_VNNI but without tiles

}  // namespace moelight
