// Linear layers and expert feed-forward over weights as the checkpoint has them: what goes in, and the face between
// the driver and an instruction set.
//
// Legend: T tokens, N rows of a weight, K its columns ("depth"), E experts, H hidden, I intermediate.
//
// The result of one (token, row), on which nothing else has any influence: K is cut into blocks of fixed size; within
// a block lane i sums the products of elements i, i + step, ...; the lanes are added in a fixed tree; the blocks are
// added in order, in float32. Then comes the bias, then the rounding to the type of x.
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

// ---------------------------------------------------------------------------------------------------------------------

// Tokens and rows that one thread multiplies at a time. They shape the work, not the result.
constexpr int64_t kTokenBlock = 96;
constexpr int64_t kUnitRows = 64;
constexpr int64_t kUpColumn = kUnitRows / 2;  // where the sums of up rows begin beside those of their gates

// Bytes of a row that lie in one block of K, as the lanes multiply them.
constexpr int64_t kBlockBytes = 4096;
constexpr int64_t kRowTile = 4;

// Some rows of a weight times some tokens.
struct Product {
  const char* weight;  // the first of the rows
  int64_t row_bytes;
  const float* scale;  // of the first of the rows
  int64_t group, groups;
  int64_t rows, depth;
  const void* x;  // of the element type of the lanes, zeros from depth to the next multiple of their step
  int64_t x_stride, tokens;
};

// What an instruction set provides for one type of element.
struct Lanes {
  int64_t step;  // elements taken at a time
  DType element;
  // sums[t][r] += x[t] . weight[r], sums kUnitRows apart; expanded: kRowTile * kBlockBytes, aligned to 64 bytes.
  // Null for a type of weight that these lanes do not take.
  void (*multiply[kWeightTypes])(const Product&, void* expanded, float* sums);
  // One row of x, by its type, to elements; zeros up to the next multiple of the step.
  void (*widen[kDTypes])(const void* x, int64_t depth, void* out);
  // sums + bias, rounded to the type of x.
  void (*store[kDTypes])(const float* sums, const float* bias, int64_t rows, int64_t tokens, void* out, int64_t stride);
  // The activation of gate and up, rounded to the type of x, as elements.
  void (*activate[kDTypes])(Activation, const float* sums, const float* bias, int64_t columns, int64_t tokens,
                            void* out, int64_t stride);
};

const Lanes& ffn_scalar();
const Lanes& ffn_avx2();
const Lanes& ffn_avx512();
const Lanes& ffn_avx512_bf16();

}  // namespace moelight
