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

#include "moelight/half.h"

namespace moelight {

enum class WeightType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kInt8 = 3, kInt4 = 4 };
constexpr int kWeightTypes = 5;

constexpr bool has_scale(WeightType type) { return type == WeightType::kInt8 || type == WeightType::kInt4; }

enum class Activation : int { kSilu = 0, kGeluTanh = 1, kSwigluOai = 2 };

// Two values of a row, the earlier in the low four bits; the number meant is the value less 8.
struct Int4 {
  uint8_t two;
};

// What the weights of one product have in common.
struct Format {
  WeightType type;
  int64_t rows, depth;
  int64_t group;   // elements that share a scale: a multiple of kGroupStep, or at least depth
  int64_t groups;  // scales from one row to the next
  DType bias_type;
};

constexpr int64_t kGroupStep = 32;

struct Weight {
  const void* data;  // [rows, depth], rows row_bytes apart; null for an expert that is not there
  int64_t row_bytes;
  const float* scale;  // [rows, groups]; null for floats
  const void* bias;    // [rows] or null
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
  Format up_format, down_format;
  const Weight* up;    // [E] of [2I, H], gate rows first
  const Weight* down;  // [E] of [H, I]
  int threads;
};

void expert_ffn(const ExpertArgs& args);

// The most that a call with these sizes leaves allocated for the thread that makes it; every call needs what its
// largest predecessor needed, and no more.
int64_t expert_ffn_workspace(DType x, const Format& up, const Format& down, int64_t tokens, int64_t experts,
                             int threads);
int64_t linear_workspace(DType x, const Format& format, int64_t tokens, int threads);

// What the calling thread's calls have left allocated so far.
int64_t ffn_workspace_kept();

// ---------------------------------------------------------------------------------------------------------------------

// Tokens and rows that one thread multiplies at a time. They shape the work, not the result.
constexpr int64_t kTokenBlock = 96;
constexpr int64_t kUnitRows = 64;
constexpr int64_t kUpColumn = kUnitRows / 2;  // where the sums of up rows begin beside those of their gates

// Some rows of a weight times some tokens.
struct Product {
  const char* weight;  // the first of the rows
  int64_t row_bytes;
  const float* scale;  // of the first of the rows
  int64_t group, groups;
  int64_t rows, depth;  // at most kUnitRows rows
  const char* x;        // prepared tokens, x_bytes apart
  int64_t x_bytes, tokens;
  const char* next;  // what is read afterwards, in rows next_bytes apart, that it may be fetched; or null
  int64_t next_bytes;
};

// What an instruction set provides for activations of one type and weights of one type.
struct Kernel {
  int64_t step;           // what a prepared token holds is padded with zeros to a multiple of this
  int64_t element_bytes;  // of a prepared token
  int64_t head_bytes;     // that a prepared token has before its elements
  int64_t token_step;     // prepared tokens come in multiples of this, the last ones zero
  bool in_place;          // a token of which the step is a divisor is as good as prepared
  int64_t scratch_bytes;  // of `multiply`
  // sums[t][r] += x[t] . weight[r], sums kUnitRows apart and zero before; scratch aligned to 64 bytes.
  void (*multiply)(const Product&, void* scratch, float* sums);
  // `count` rows of x, x_bytes apart, to prepared ones and zero ones up to the next multiple of the token step.
  void (*prepare)(const void* x, int64_t x_bytes, int64_t count, int64_t depth, void* out);
  // sums + bias, rounded to the type of x; rows of out are `stride` elements apart.
  void (*store)(const float* sums, const float* bias, int64_t rows, int64_t tokens, void* out, int64_t stride);
  // The activation of gate and up, rounded to the type of x.
  void (*activate)(Activation, const float* sums, const float* bias, int64_t columns, int64_t tokens, void* out,
                   int64_t stride);
};

Kernel ffn_scalar(DType x, WeightType weight);
Kernel ffn_avx2(DType x, WeightType weight);
Kernel ffn_avx512(DType x, WeightType weight);
// bfloat16 x alone, and bfloat16, int8 or int4 weights.
Kernel ffn_avx512_dots(WeightType weight);
Kernel ffn_amx(WeightType weight);
Kernel ffn_emulated(WeightType weight);  // of ffn_amx, for processors with AVX512_BF16 but without tiles

}  // namespace moelight
