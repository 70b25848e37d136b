// Cuts linear layers and experts into units, hands them to the threads, and keeps the intermediate in cache. Does not
// depend on instruction set.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>
#include <vector>

#include "ffn.h"
#include "forms.h"
#include "moelight/cpu.h"
#include "moelight/workspace.h"
#include "quantized/integers.h"
#include "streams.h"
#include "work.h"

namespace moelight {
namespace {

// Rows that pass through a layer together: kGroupTokens, or more where what lies between two products stays within
// kGroupBytes.
constexpr int64_t kGroupTokens = 512, kGroupBytes = 4 << 20;
// Most tokens that a unit multiplies with its rows, kTokenBlock at a time.
constexpr int64_t kUnitTokens = 4 * kTokenBlock;
// Of Kernel::by_rows as many as take no more than these bytes: half of a second-level cache beside tiles.
constexpr int64_t kStayingBytes = 1 << 20;
// With no more tokens than this a unit is a stretch of memory to read, of about kUnitBytes.
constexpr int64_t kFewTokens = 24;
constexpr int64_t kUnitBytes = 256 << 10;
// Below this many tokens of a piece, tokens whose strides conflict in a cache are not copied apart.
constexpr int64_t kMinSpread = 8;
// Tokens that one thread prepares at a time.
constexpr int64_t kPreparedTokens = 32;
// Of a transposed weight a unit is stretches of its lines: up to kWideBlocks times kUnitRows at once, as many as have
// sums that stay in the first-level cache.
constexpr int64_t kWideBlocks = 8;
// Elements of K turned at a time, and bytes of a row of them, which fall into different cache sets.
constexpr int64_t kTurnedDepth = 1024, kTurnedRow = 2 * kTurnedDepth + 64;
// Less work than this is done before a second thread wakes: bytes to read, and products to sum.
constexpr int64_t kSmallBytes = 128 << 10, kSmallProducts = 1 << 20;

Kernel integer_kernel(DType x, [[maybe_unused]] Int8Products form) {
#if defined(__x86_64__)
  switch (form) {
    case Int8Products::kDots:
      return active_isa() == Isa::kAvx512 ? integers_avx512_vnni(x) : integers_avx_vnni(x);
    case Int8Products::kTiles:
      return integers_amx(x);
    case Int8Products::kEmulated:
      return integers_emulated(x);
    case Int8Products::kWide:
      break;
  }
#elif defined(__aarch64__)
  if (form == Int8Products::kDots) return mixes_signs() ? integers_neon_i8mm(x) : integers_neon_dots(x);
#endif
  return MOELIGHT_ACTIVE(integers)(x);
}

// `like`: one of the weights, or null.
ProductClass class_of(const Format& format, const Quantized* like) {
  if (like == nullptr) return format.integers ? ProductClass::kFine : ProductClass::kBf16;
  if (format.integers) return integer_form(*like).part > 32 ? ProductClass::kCoarse : ProductClass::kFine;
  const FormatTraits& stored = *like->format;
  return stored.block_bytes < stored.block ? ProductClass::kLow : ProductClass::kHigh;
}

bool has_pairs(DType x, const Format& format) {
  return x == DType::kBFloat16 && format.type != WeightType::kFloat32 && format.type != WeightType::kFloat16;
}

// A Bf16Products, or an Int8Products of formats with integers. Forms of transposed weights differ in bits: rows must
// not choose among them.
int form_for(DType x, const Format& format, ProductClass products, int size) {
  if (format.integers) return static_cast<int>(int8_form(products, size));
  if (!has_pairs(x, format)) return static_cast<int>(Bf16Products::kWide);
  return static_cast<int>(format.transposed ? bf16_products() : bf16_form(products, size));
}

// Transposed weights meet dot products of float32 rather than of pairs of bfloat16, which take two lines of K at once;
// for tiles they are turned.
Kernel kernel_for(DType x, const Format& format, [[maybe_unused]] int form) {
  const WeightType weight = format.type;
  if (format.integers) return integer_kernel(x, static_cast<Int8Products>(form));
  [[maybe_unused]] const bool pairs = has_pairs(x, format);
#if defined(__x86_64__)
  if (pairs && active_isa() == Isa::kAvx2 && !format.transposed) return ffn_avx2_pairs(weight);
  if (pairs && active_isa() == Isa::kAvx512) {
    switch (static_cast<Bf16Products>(form)) {
      case Bf16Products::kPairs:
        if (format.transposed) break;
        return ffn_avx512_dots(weight);
      case Bf16Products::kHalves:
        if (format.transposed) break;
        return ffn_avx512_halves(weight);
      case Bf16Products::kTiles:
        return ffn_amx(weight);
      case Bf16Products::kEmulated:
        return ffn_emulated(weight);
      case Bf16Products::kWide:
        break;
    }
  }
#elif defined(__aarch64__)
  if (pairs && active_isa() == Isa::kNeon && !format.transposed)
    return form == static_cast<int>(Bf16Products::kPairs) ? ffn_neon_bf16() : ffn_neon_pairs();
#endif
  return MOELIGHT_ACTIVE(ffn)(x, weight);
}

int64_t rounded_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// Rows whose bytes are a multiple of kSets lie in the same sets of a cache, so that a block of K of some tokens has a
// part of it alone. Tokens that are written here lie so far apart that it has all of it.
constexpr int64_t kSets = 4096, kApartBytes = 2048;
bool conflicting(int64_t row_bytes) { return row_bytes % kSets == 0; }
int64_t spread(int64_t row_bytes) { return row_bytes + (conflicting(row_bytes) ? kApartBytes : 0); }

// Rows of bytes; of a quantised matrix the codes from one of its rows on.
struct Span {
  char* data;
  int64_t stride;
  const Quantized* quantized = nullptr;
  int64_t first_row = 0;
  char* row(int64_t i) const { return data + i * stride; }
};

// One kind of product: its kernel, and its tokens as they arrive and as they are multiplied.
struct Projection {
  Kernel kernel;
  Format format;
  DType type;
  ProductClass products;
  int form;
  const Quantized* like = nullptr;
  Unpacking unpacking = {};
  bool in_place = false;
  Span source = {}, prepared = {};

  Projection(DType type, const Format& format, int form, ProductClass products = {})
      : kernel(kernel_for(type, format, form)), format(format), type(type), products(products), form(form) {}

  bool runs_in_place() const { return kernel.in_place && format.depth % kernel.step == 0; }
  int64_t prepared_bytes() const {
    const int64_t bytes = kernel.gap_bytes + rounded_up(format.depth, kernel.step) * kernel.element_bytes;
    return runs_in_place() ? spread(bytes) : bytes;
  }
  bool conflicts() const { return conflicting(format.depth * kernel.element_bytes); }
  // Of `tokens` in at most `pieces` experts.
  int64_t buffer_bytes(int64_t tokens, int64_t pieces) const {
    if (runs_in_place() && !conflicts()) return 0;
    const int64_t max_tokens = std::min(tokens + pieces * (kernel.token_step - 1), tokens * kernel.token_step);
    return Workspace::aligned(max_tokens * prepared_bytes());
  }

  // Chooses how weights like this one are unpacked, once for a call.
  void choose(const Weight& weight) {
    like = weight.quantized;
    if (like != nullptr) unpacking = kernel.unpacking(*like);
  }
  void serve_by(int other_form) {
    kernel = kernel_for(type, format, other_form), form = other_form;
    if (like != nullptr) unpacking = kernel.unpacking(*like);
  }
  void count() const { count_product(products, form); }

  // Whether prepared tokens are the same for both.
  bool prepares_like(const Projection& other) const {
    const Kernel &one = kernel, &two = other.kernel;
    if (one.prepare != two.prepare || one.quantise != two.quantise || one.in_place != two.in_place) return false;
    return one.quantise == nullptr || integer_form(*like) == integer_form(*other.like);
  }
  // Takes the tokens of another, which prepares them.
  void share_input(const Projection& other) {
    in_place = other.in_place, source = other.source, prepared = other.prepared;
  }

  // Where the tokens come from, at most `max_tokens` of a piece, and where `buffer_bytes` for the prepared ones are.
  void bind_input(const Span& from, int64_t max_tokens, char* buffer) {
    in_place = runs_in_place() && (max_tokens < kMinSpread || !conflicts() || !conflicting(from.stride));
    source = from;
    prepared = in_place ? from : Span{buffer, prepared_bytes()};
  }

  void prepare(int64_t from, int64_t to, int64_t count) const {
    if (in_place) return;
    if (kernel.quantise != nullptr)
      return kernel.quantise(*like, source.row(from), source.stride, count, prepared.row(to), prepared.stride);
    if (runs_in_place()) {
      for (int64_t t = 0; t < count; ++t)
        std::memcpy(prepared.row(to + t), source.row(from + t),
                    static_cast<size_t>(format.depth * kernel.element_bytes));
      return;
    }
    kernel.prepare(source.row(from), source.stride, count, format.depth, prepared.row(to));
  }

  int64_t element_bytes() const { return format.type == WeightType::kFloat32 ? 4 : 2; }  // of floats
  bool multiplies_transposed() const { return format.transposed && kernel.multiply_transposed != nullptr; }
  // Times kUnitRows: rows that are multiplied at once.
  int64_t wide(int64_t tokens) const {
    return multiplies_transposed() ? std::clamp<int64_t>(kUnitRows / std::max<int64_t>(tokens, 1), 1, kWideBlocks) : 1;
  }
  // Most that a unit multiplies with its rows.
  int64_t unit_tokens() const {
    if (!kernel.by_rows) return kUnitTokens;
    return std::clamp(kStayingBytes / prepared_bytes() / 16 * 16, kTokenBlock, kUnitTokens);
  }
  int64_t scratch_bytes() const {
    return Workspace::aligned(kernel.scratch_bytes) + (kernel.turn == nullptr ? 0 : kUnitRows * kTurnedRow);
  }
  // Of one row.
  int64_t read_bytes(const Weight& weight) const {
    return format.transposed ? format.depth * element_bytes() : weight.row_bytes;
  }
  Span rows_of(const Weight& weight, int64_t row) const {
    if (format.transposed || weight.data == nullptr) return {nullptr, 0};
    return {const_cast<char*>(static_cast<const char*>(weight.data)) + row * weight.row_bytes, weight.row_bytes,
            weight.quantized, weight.first_row + row};
  }

  void multiply(const Weight& weight, int64_t row, int64_t rows, int64_t token, int64_t tokens, const Span& next,
                char* scratch, float* sums) const {
    const int64_t step = format.transposed ? element_bytes() : weight.row_bytes;
    const Product product = {
        .weight = weight.data == nullptr ? nullptr : static_cast<const char*>(weight.data) + row * step,
        .row_bytes = weight.row_bytes,
        .rows = rows,
        .depth = format.depth,
        .x = prepared.row(token),
        .x_bytes = prepared.stride,
        .tokens = tokens,
        .next = next.data,
        .next_bytes = next.stride,
        .quantized = weight.quantized,
        .first_row = weight.first_row + row,
        .unpacking = unpacking,
        .next_quantized = next.quantized,
        .next_row = next.first_row,
    };
    if (!format.transposed) return kernel.multiply(product, scratch, sums);
    if (kernel.multiply_transposed != nullptr) return kernel.multiply_transposed(product, scratch, sums);
    char* const turned = scratch + Workspace::aligned(kernel.scratch_bytes);
    for (int64_t k = 0; k < format.depth; k += kTurnedDepth) {
      Product part = product;
      part.depth = std::min(kTurnedDepth, format.depth - k);
      kernel.turn(product.weight + k * product.row_bytes, product.row_bytes, rows, part.depth, turned, kTurnedRow);
      part.weight = turned, part.row_bytes = kTurnedRow, part.next = nullptr, part.continued = k > 0;
      part.x = product.x + k * kernel.element_bytes * kernel.token_step;
      kernel.multiply(part, scratch, sums);
    }
  }

  void read_bias(const Weight& weight, int64_t row, int64_t rows, float* bias) const {
    if (weight.bias == nullptr) return;
    for (int64_t i = 0; i < rows; ++i) {
      switch (format.bias_type) {
        case DType::kFloat32:
          bias[i] = static_cast<const float*>(weight.bias)[row + i];
          break;
        case DType::kBFloat16:
          bias[i] = to_float(static_cast<const Bf16*>(weight.bias)[row + i]);
          break;
        case DType::kFloat16:
          bias[i] = to_float(static_cast<const Fp16*>(weight.bias)[row + i]);
          break;
      }
    }
  }
};

// Some tokens of one expert. `first` counts rows of x and of the intermediate from the start of the group,
// `prepared_row` prepared tokens.
struct Piece {
  const Weight *gate, *up, *down;  // no gate unless it is apart
  int64_t first, tokens, prepared_gate, prepared_up, prepared_down;
};

// What one thread multiplies with.
struct Worker {
  float* sums;
  char* scratch;

  void clear(int64_t tokens, int64_t wide) const {
    std::memset(sums, 0, static_cast<size_t>(tokens * wide * kUnitRows) * sizeof(float));
  }

  // Twice those of kUnitRows: of gates and of ups.
  static constexpr int64_t kSumsBytes = 2 * kTokenBlock * kUnitRows * static_cast<int64_t>(sizeof(float));
  static int64_t bytes(int64_t scratch) { return kSumsBytes + Workspace::aligned(scratch); }
};

// The products that lead to what is between. A linear layer has none. `gate`: that of gates, where these are stored
// otherwise; `twice`: which meet tokens that are prepared for them.
struct Inward {
  const Projection *up, *gate;
  bool twice;
};

// One group of tokens on its way through one product or two.
class Group {
 public:
  Group(const std::vector<Piece>& pieces, const Inward& inward, const Projection& down, const Activation& activation,
        Pairing pairing, const Span& inner, const Span& out, char* workers, int64_t worker_bytes)
      : pieces_(pieces),
        up_(inward.up),
        gate_(inward.gate == nullptr ? inward.up : inward.gate),
        twice_(inward.twice),
        down_(down),
        activation_(activation),
        pairing_(pairing),
        inner_(inner),
        out_(out),
        workers_(workers),
        worker_bytes_(worker_bytes) {}

  void run(int threads) {
    Work work(static_cast<int64_t>(pieces_.size()));
    const int64_t useful = small() ? 1 : threads;
    if (up_ != nullptr) {
      add_preparation(work, up_->in_place && (!twice_ || gate_->in_place), kPrepareX);
      add_products(work, *up_, down_.format.depth, pairing_ == Pairing::kUngated ? 1 : 2, kUp, useful);
    }
    add_preparation(work, down_.in_place || prepares_inner(), kPrepareInner);
    add_products(work, down_, down_.format.rows, 1, kDown, useful);
    work.run(static_cast<int>(useful), [this](const Unit& unit, const Unit* next, int thread) {
      char* const memory = workers_ + thread * worker_bytes_;
      const Worker worker = {reinterpret_cast<float*>(memory), memory + Worker::kSumsBytes};
      const Piece& piece = pieces_[static_cast<size_t>(unit.piece)];
      switch (unit.stage) {
        case kPrepareX:
          if (twice_) gate_->prepare(piece.first + unit.token, piece.prepared_gate + unit.token, unit.tokens);
          return up_->prepare(piece.first + unit.token, piece.prepared_up + unit.token, unit.tokens);
        case kUp:
          return activate(unit, piece, next, worker);
        case kPrepareInner:
          return down_.prepare(piece.first + unit.token, piece.prepared_down + unit.token, unit.tokens);
        case kDown:
          return project(unit, piece, next, worker);
      }
    });
  }

 private:
  bool small() const {
    int64_t bytes = 0, products = 0;
    for (const Piece& piece : pieces_) {
      bytes += down_.format.rows * piece.down->row_bytes;
      products += down_.format.rows * down_.format.depth * piece.tokens;
    }
    return up_ == nullptr && bytes <= kSmallBytes && products <= kSmallProducts;
  }

  void add_preparation(Work& work, bool in_place, Stage stage) const {
    if (in_place) return;
    for (size_t p = 0; p < pieces_.size(); ++p)
      for (int64_t t = 0; t < pieces_[p].tokens; t += kPreparedTokens)
        work.add({stage, static_cast<int32_t>(p), 0, 0, t, std::min(kPreparedTokens, pieces_[p].tokens - t)});
  }

  // `rows` of each piece, of which each stands for `weight_rows` rows of its weights.
  void add_products(Work& work, const Projection& projection, int64_t rows, int64_t weight_rows, Stage stage,
                    int64_t threads) const {
    const int64_t step = kUnitRows / weight_rows, all = rows * static_cast<int64_t>(pieces_.size());
    for (size_t p = 0; p < pieces_.size(); ++p) {
      const Piece& piece = pieces_[p];
      int64_t some = step;
      if (piece.tokens <= kFewTokens) {
        const int64_t bytes = weight_rows * projection.read_bytes(stage == kUp ? *piece.up : *piece.down);
        const int64_t lines = kWideBlocks * (pairing_ == Pairing::kInterleaved && stage == kUp ? step : kUnitRows);
        const int64_t max_rows =
            projection.multiplies_transposed() ? lines : kUnitBytes / std::max<int64_t>(bytes, 1) / step * step;
        some = std::max<int64_t>(std::min(rounded_up(all / (threads * 8) + 1, step), max_rows), step / 2);
      }
      const int64_t cuts = parts_of(piece.tokens, projection.unit_tokens());
      for (int64_t r = 0; r < rows; r += some)
        for (int64_t c = 0; c < cuts; ++c) {
          const int64_t t = cut(piece.tokens, cuts, c);
          work.add(
              {stage, static_cast<int32_t>(p), r, std::min(some, rows - r), t, cut(piece.tokens, cuts, c + 1) - t});
        }
    }
  }

  // The first rows of the weight that a unit reads.
  Span first_rows(const Unit* unit) const {
    if (unit == nullptr || unit->stage == kPrepareX || unit->stage == kPrepareInner) return {nullptr, 0};
    const Piece& piece = pieces_[static_cast<size_t>(unit->piece)];
    return unit->stage == kUp ? up_rows(piece, unit->row) : down_.rows_of(*piece.down, unit->row);
  }
  Span up_rows(const Piece& piece, int64_t row) const {
    if (pairing_ == Pairing::kInterleaved) return up_->rows_of(*piece.up, 2 * row);
    return piece.gate == nullptr ? up_->rows_of(*piece.up, row) : gate_->rows_of(*piece.gate, row);
  }

  // activation(x gate^T + bias, x up^T + bias), rounded to the type of x.
  void activate(const Unit& unit, const Piece& piece, const Unit* next, const Worker& worker) const {
    const int64_t bytes = dtype_bytes(up_->type), count = blocks(unit.tokens), end = unit.row + unit.rows;
    const bool halves = pairing_ == Pairing::kInterleaved || (pairing_ == Pairing::kApart && !in_lines());
    const int64_t block = halves ? kUpColumn : kUnitRows, step = block * wide(unit.tokens);
    for (int64_t row = unit.row; row < end; row += step) {
      const int64_t rows = std::min(step, end - row);
      const Span after = row + rows < end ? up_rows(piece, row + rows) : first_rows(next);
      for (int64_t b = 0; b < count; ++b) {
        const int64_t t = unit.token + cut(unit.tokens, count, b),
                      some = cut(unit.tokens, count, b + 1) - (t - unit.token);
        multiply_up(piece, row, rows, t, some, b + 1 < count ? up_rows(piece, row) : after, worker);
        const float* sums = worker.sums;
        for (int64_t at = row; at < row + rows; at += block, sums += some * kUnitRows) {
          float bias[kUnitRows] = {}, up_bias[kUnitRows] = {};
          const int64_t columns = std::min(block, row + rows - at);
          read_up_bias(piece, at, columns, bias, up_bias);
          if (prepares_inner()) {
            const int64_t tokens = down_.kernel.token_step;
            up_->kernel.activate_prepared(
                activation_, pairing_, sums, sums + to_ups(some), bias, up_bias, columns, some,
                down_.prepared.row(piece.prepared_down + t) + at * tokens * down_.kernel.element_bytes,
                tokens * down_.prepared.stride);
            continue;
          }
          up_->kernel.activate(activation_, pairing_, sums, sums + to_ups(some), bias, up_bias, columns, some,
                               inner_.row(piece.first + t) + at * bytes, inner_.stride / bytes);
        }
      }
    }
  }

  // Gates and ups by lines of transposed weights: more rows at once than where they are stored in two formats.
  bool in_lines() const { return gate_ == up_ && up_->multiplies_transposed(); }
  int64_t wide(int64_t tokens) const { return gate_ == up_ ? up_->wide(tokens) : 1; }
  // From the sums of gates to those of ups: beside them in one block, or after all blocks.
  int64_t to_ups(int64_t tokens) const {
    if (up_->kernel.by_rows) return kUpColumn * kTokenBlock;
    return in_lines() ? wide(tokens) * tokens * kUnitRows : kUpColumn;
  }
  // What is activated is prepared for the last product as it leaves its sums.
  bool prepares_inner() const {
    return up_ != nullptr && up_->kernel.activate_prepared != nullptr && up_->kernel.prepare == down_.kernel.prepare;
  }

  // The sums of `rows` gates and ups.
  void multiply_up(const Piece& piece, int64_t row, int64_t rows, int64_t token, int64_t tokens, const Span& after,
                   const Worker& worker) const {
    const int64_t prepared_row = piece.prepared_up + token;
    if (!up_->kernel.by_rows) worker.clear(tokens, wide(tokens) * (pairing_ == Pairing::kApart && in_lines() ? 2 : 1));
    if (pairing_ == Pairing::kInterleaved)
      return up_->multiply(*piece.up, 2 * row, 2 * rows, prepared_row, tokens, after, worker.scratch, worker.sums);
    if (pairing_ == Pairing::kUngated)
      return up_->multiply(*piece.up, row, rows, prepared_row, tokens, after, worker.scratch, worker.sums);
    const Span up_first = up_->rows_of(*piece.up, row);
    gate_->multiply(*piece.gate, row, rows, piece.prepared_gate + token, tokens, up_first, worker.scratch, worker.sums);
    up_->multiply(*piece.up, row, rows, prepared_row, tokens, after, worker.scratch, worker.sums + to_ups(tokens));
  }

  void read_up_bias(const Piece& piece, int64_t row, int64_t rows, float* bias, float* up_bias) const {
    if (pairing_ == Pairing::kInterleaved) return up_->read_bias(*piece.up, 2 * row, 2 * rows, bias);
    if (pairing_ == Pairing::kUngated) return up_->read_bias(*piece.up, row, rows, bias);
    gate_->read_bias(*piece.gate, row, rows, bias);
    up_->read_bias(*piece.up, row, rows, up_bias);
  }

  // x W^T + bias, rounded to the type of x.
  void project(const Unit& unit, const Piece& piece, const Unit* next, const Worker& worker) const {
    const int64_t bytes = dtype_bytes(down_.type), end = unit.row + unit.rows, count = blocks(unit.tokens);
    const int64_t step = kUnitRows * down_.wide(unit.tokens);
    for (int64_t row = unit.row; row < end; row += step) {
      const int64_t rows = std::min(step, end - row);
      const Span after = row + rows < end ? down_.rows_of(*piece.down, row + rows) : first_rows(next);
      for (int64_t b = 0; b < count; ++b) {
        const int64_t t = unit.token + cut(unit.tokens, count, b),
                      some = cut(unit.tokens, count, b + 1) - (t - unit.token);
        if (!down_.kernel.by_rows) worker.clear(some, down_.wide(some));
        down_.multiply(*piece.down, row, rows, piece.prepared_down + t, some, after, worker.scratch, worker.sums);
        const float* sums = worker.sums;
        for (int64_t at = row; at < row + rows; at += kUnitRows, sums += some * kUnitRows) {
          float bias[kUnitRows] = {};
          const int64_t columns = std::min(kUnitRows, row + rows - at);
          down_.read_bias(*piece.down, at, columns, bias);
          down_.kernel.store(sums, bias, columns, some, out_.row(piece.first + t) + at * bytes, out_.stride / bytes);
        }
      }
    }
  }

  // Token blocks of nearly equal size that begin at multiples of a tile's sixteen.
  static int64_t parts_of(int64_t tokens, int64_t size) { return (tokens + size - 1) / size; }
  static int64_t blocks(int64_t tokens) { return parts_of(tokens, kTokenBlock); }
  static int64_t cut(int64_t tokens, int64_t count, int64_t i) {
    return std::min(tokens, rounded_up(tokens * i / count, 16));
  }

  const std::vector<Piece>& pieces_;
  const Projection *up_, *gate_;
  bool twice_;
  const Projection& down_;
  Activation activation_;
  Pairing pairing_;
  Span inner_, out_;
  char* workers_;
  int64_t worker_bytes_;
};

int64_t group_tokens(const Projection& down) {
  return std::max(kGroupTokens, kGroupBytes / (down.format.depth * dtype_bytes(down.type)));
}

// From row `first` of x on, whole experts as long as the group has room, of a large one what fits; returns their
// rows.
int64_t next_group(const ExpertArgs& args, const Inward& inward, const Projection& down, int64_t first, int64_t& expert,
                   std::vector<Piece>& pieces) {
  const int64_t max_rows = group_tokens(down);
  const Projection &up = *inward.up, &gate = inward.twice ? *inward.gate : up;
  int64_t rows = 0, prepared_gate = 0, prepared_up = 0, prepared_down = 0;
  pieces.clear();
  while (expert < args.experts && rows < max_rows) {
    const int64_t left = args.offsets[expert + 1] - (first + rows);
    if (left > max_rows - rows && rows > 0) break;
    const int64_t some = std::min(left, max_rows);
    if (some > 0)
      pieces.push_back({args.gate == nullptr ? nullptr : args.gate + expert, args.up + expert, args.down + expert, rows,
                        some, gate.runs_in_place() ? rows : prepared_gate, up.runs_in_place() ? rows : prepared_up,
                        down.runs_in_place() ? rows : prepared_down});
    rows += some;
    prepared_gate += rounded_up(some, gate.kernel.token_step);
    prepared_up += rounded_up(some, up.kernel.token_step), prepared_down += rounded_up(some, down.kernel.token_step);
    if (some == left) ++expert;
  }
  return rows;
}

Workspace& workspace() {
  thread_local Workspace workspace;
  return workspace;
}

constexpr int kUnmeasured = -1;
std::atomic<int> stream_forms[kStreamSizes] = {kUnmeasured, kUnmeasured, kUnmeasured};

// From one row of what lies between two products to the next.
int64_t inner_bytes(const Projection& down) { return spread(down.format.depth * dtype_bytes(down.type)); }

int64_t largest(const std::vector<Piece>& pieces) {
  int64_t max_tokens = 0;
  for (const Piece& piece : pieces) max_tokens = std::max(max_tokens, piece.tokens);
  return max_tokens;
}

// What a call works in, one after the other.
struct Buffers {
  int64_t gate, x, inner, prepared, worker;
  int64_t total(int threads) const { return gate + x + inner + prepared + threads * worker; }
};

// That of gate and up where tiles would serve one of their two formats alone: sums of both lie alike.
constexpr int kFormBesideOthers = static_cast<int>(Bf16Products::kHalves);

// Calls f with a projection for every form that may serve weights of a format here.
template <class F>
void for_each_form(DType x, const Format& format, const F& f) {
  const bool several =
      format.integers ? int8_products() != Int8Products::kWide : bf16_products() != Bf16Products::kWide;
  const int sizes = several ? kFormSizes : 1;
  unsigned seen = 0;
  bool by_rows = false;
  const auto meet = [&](int form) {
    if ((seen >> form & 1) != 0) return;
    seen |= 1U << form;
    const Projection projection(x, format, form);
    by_rows = by_rows || projection.kernel.by_rows;
    f(projection);
  };
  for (int c = 0; c < kProductClasses; ++c) {
    const auto products = static_cast<ProductClass>(c);
    if (has_integers(products) != format.integers) continue;
    if (!format.integers && (products == ProductClass::kBf16) == (format.type == WeightType::kQuantized)) continue;
    for (int size = 0; size < sizes; ++size) meet(form_for(x, format, products, size));
  }
  if (by_rows) meet(kFormBesideOthers);
}

// Enough for every form, as nobody who asks beforehand knows which will serve. Without `up` for a linear layer; `twice`
// as in Inward.
Buffers buffers_of(DType x, const Format* gate, const Format* up, const Format& down, bool twice, int64_t tokens,
                   int64_t experts) {
  Buffers sizes = {};
  int64_t scratch = 0, max_tokens = std::min(tokens, kGroupTokens), pieces = 0;
  const auto raise = [](int64_t& to, int64_t bytes) { to = std::max(to, bytes); };
  for_each_form(x, down, [&](const Projection& projection) {
    if (up != nullptr) max_tokens = std::min(tokens, group_tokens(projection));
    pieces = std::min(max_tokens, experts);
    if (up != nullptr) sizes.inner = Workspace::aligned(max_tokens * inner_bytes(projection));
    if (up == nullptr || !projection.runs_in_place())
      raise(sizes.prepared, projection.buffer_bytes(max_tokens, pieces));
    raise(scratch, projection.scratch_bytes());
  });
  const auto inward = [&](const Format* format, bool prepares, int64_t& bytes) {
    if (format == nullptr) return;
    for_each_form(x, *format, [&](const Projection& projection) {
      if (prepares) raise(bytes, projection.buffer_bytes(max_tokens, pieces));
      raise(scratch, projection.scratch_bytes());
    });
  };
  inward(up, true, sizes.x), inward(gate, twice, sizes.gate);
  sizes.worker = Worker::bytes(scratch);
  return sizes;
}

// What serves a call whose experts have about so many rows; one of the weights, or null, tells their class.
Projection projection_for(DType x, const Format& format, const Weight* weight, int64_t rows) {
  const ProductClass products = class_of(format, weight == nullptr ? nullptr : weight->quantized);
  Projection projection(x, format, form_for(x, format, products, form_size(rows)), products);
  if (weight != nullptr) projection.choose(*weight);
  return projection;
}

}  // namespace

void linear(const LinearArgs& args) {
  const Tokens& tokens = args.tokens;
  const int64_t bytes = dtype_bytes(tokens.type);
  Projection projection = projection_for(tokens.type, args.format, &args.weight, tokens.count);
  projection.count();
  const Inward none = {nullptr, nullptr, false};
  const Buffers buffers = buffers_of(tokens.type, nullptr, nullptr, args.format, false, tokens.count, 1);
  char* const memory = workspace().bytes(buffers.total(args.threads));
  const Span x = {const_cast<char*>(static_cast<const char*>(tokens.x)), tokens.x_stride * bytes};
  const Span out = {static_cast<char*>(tokens.out), tokens.out_stride * bytes};
  for (int64_t first = 0; first < tokens.count; first += kGroupTokens) {
    projection.bind_input({x.row(first), x.stride}, std::min(kGroupTokens, tokens.count - first), memory);
    const std::vector<Piece> pieces = {
        {nullptr, nullptr, &args.weight, 0, std::min(kGroupTokens, tokens.count - first), 0, 0, 0}};
    Group(pieces, none, projection, {}, Pairing::kApart, {}, {out.row(first), out.stride}, memory + buffers.prepared,
          buffers.worker)
        .run(args.threads);
  }
}

void expert_ffn(const ExpertArgs& args) {
  const Tokens& tokens = args.tokens;
  const int64_t bytes = dtype_bytes(tokens.type);
  int64_t busy = 0, first_busy = 0;
  for (int64_t e = args.experts; e-- > 0;)
    if (args.offsets[e + 1] > args.offsets[e]) ++busy, first_busy = e;
  const int64_t rows_each = busy == 0 ? 0 : (tokens.count + busy - 1) / busy;
  const auto serving = [&](const Format& format, const Weight* weights) {
    return projection_for(tokens.type, format, busy == 0 ? nullptr : weights + first_busy, rows_each);
  };
  const Format* const gate_format = args.gate_format ? &*args.gate_format : nullptr;
  Projection up = serving(args.up_format, args.up), down = serving(args.down_format, args.down);
  Projection gate = gate_format != nullptr ? serving(*gate_format, args.gate) : up;
  if (gate.kernel.by_rows != up.kernel.by_rows) (up.kernel.by_rows ? up : gate).serve_by(kFormBesideOthers);
  up.count(), down.count();
  if (gate_format != nullptr) gate.count();
  const bool twice = gate_format != nullptr && !gate.prepares_like(up);
  const Inward inward = {&up, gate_format != nullptr ? &gate : nullptr, twice};
  const Buffers buffers =
      buffers_of(tokens.type, gate_format, &args.up_format, args.down_format, twice, tokens.count, args.experts);
  char* const memory = workspace().bytes(buffers.total(args.threads));
  const Span inner = {memory + buffers.gate + buffers.x, inner_bytes(down)};
  char* const prepared = inner.data + buffers.inner;
  const Span x = {const_cast<char*>(static_cast<const char*>(tokens.x)), tokens.x_stride * bytes};
  const Span out = {static_cast<char*>(tokens.out), tokens.out_stride * bytes};
  std::vector<Piece> pieces;
  for (int64_t first = 0, expert = 0, rows; first < tokens.count; first += rows) {
    rows = next_group(args, inward, down, first, expert, pieces);
    up.bind_input({x.row(first), x.stride}, largest(pieces), memory + buffers.gate);
    if (inward.twice) {
      gate.bind_input({x.row(first), x.stride}, largest(pieces), memory);
    } else {
      gate.share_input(up);
    }
    down.bind_input(inner, largest(pieces), prepared);
    Group(pieces, inward, down, args.activation, args.pairing, inner, {out.row(first), out.stride},
          prepared + buffers.prepared, buffers.worker)
        .run(args.threads);
  }
}

int64_t expert_ffn_workspace(DType x, const Format& up, const Format& down, bool twice, int64_t tokens, int64_t experts,
                             int threads) {
  return buffers_of(x, twice ? &up : nullptr, &up, down, twice, tokens, experts).total(threads);
}

int64_t linear_workspace(DType x, const Format& format, int64_t tokens, int threads) {
  return buffers_of(x, nullptr, nullptr, format, false, tokens, 1).total(threads);
}

int stream_form(int size) {
  const int measured = stream_forms[size].load(std::memory_order_relaxed);
  if (measured != kUnmeasured) return measured;
  return near_cache_bytes() >= kLargeNear ? kFormOfLargeNear : kFormOfSmallNear;
}
void set_stream_form(int size, int form) { stream_forms[size].store(form, std::memory_order_relaxed); }

int64_t ffn_workspace_kept() { return workspace().capacity(); }

}  // namespace moelight
