// Cuts linear layers and experts into units, hands them to the threads, and keeps the intermediate in cache. Knows no
// instruction set.

#include <algorithm>
#include <cstring>
#include <vector>

#include "ffn.h"
#include "moelight/cpu.h"
#include "moelight/threads.h"
#include "moelight/workspace.h"

namespace moelight {
namespace {

// Rows that pass through a layer together; what lies between two products is no longer than this.
constexpr int64_t kGroupTokens = 512;
// Tokens that a unit multiplies with its rows, kTokenBlock at a time.
constexpr int64_t kUnitTokens = 4 * kTokenBlock;
// With no more than this the units are smaller: what counts is that all threads read to the end.
constexpr int64_t kFewTokens = 16;
constexpr int64_t kExpandedBytes = kRowTile * kBlockBytes;
constexpr int64_t kSumsBytes = kTokenBlock * kUnitRows * static_cast<int64_t>(sizeof(float));

const Lanes& lanes_for(DType x, WeightType weight) {
#if defined(__x86_64__)
  switch (active_isa()) {
    case Isa::kAvx512:
      if (x == DType::kBFloat16 && active_bf16()) {
        const Lanes& pairs = ffn_avx512_bf16();
        if (pairs.multiply[static_cast<int>(weight)] != nullptr) return pairs;
      }
      return ffn_avx512();
    case Isa::kAvx2:
      return ffn_avx2();
    case Isa::kScalar:
      break;
  }
#endif
  static_cast<void>(x), static_cast<void>(weight);
  return ffn_scalar();
}

int64_t rounded_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// Rows of activations, as some lanes want them.
struct Elements {
  char* data;
  int64_t stride;  // elements
};

// One kind of product: its lanes and the room it needs.
struct Products {
  const Lanes& lanes;
  const Format& format;

  Products(DType x, const Format& format) : lanes(lanes_for(x, format.type)), format(format) {}

  int64_t padded_depth() const { return rounded_up(format.depth, lanes.step); }
  int64_t element_bytes() const { return dtype_bytes(lanes.element); }
  int64_t room(int64_t tokens) const { return Workspace::aligned(tokens * padded_depth() * element_bytes()); }
  bool takes(const Tokens& tokens) const { return tokens.type == lanes.element && format.depth % lanes.step == 0; }

  // Rows [first, first + count) of x: where they lie if the lanes take them, else widened into `room`.
  Elements prepare(const Tokens& tokens, int64_t first, int64_t count, char* room, int threads) const {
    const char* x = static_cast<const char*>(tokens.x) + first * tokens.x_stride * dtype_bytes(tokens.type);
    if (takes(tokens)) return {const_cast<char*>(x), tokens.x_stride};
    const Elements out = {room, padded_depth()};
    const auto widen = lanes.widen[static_cast<int>(tokens.type)];
    parallel_for(static_cast<int>(std::min<int64_t>(threads, (count + 7) / 8)), count, [&](int64_t i, int) {
      widen(x + i * tokens.x_stride * dtype_bytes(tokens.type), format.depth,
            out.data + i * out.stride * element_bytes());
    });
    return out;
  }

  void multiply(const Weight& weight, int64_t row, int64_t rows, const Elements& x, int64_t token, int64_t tokens,
                char* expanded, float* sums) const {
    const Product product = {
        .weight = static_cast<const char*>(weight.data) + row * weight.row_bytes,
        .row_bytes = weight.row_bytes,
        .scale = weight.scale == nullptr ? nullptr : weight.scale + row * format.groups,
        .group = format.group,
        .groups = format.groups,
        .rows = rows,
        .depth = format.depth,
        .x = x.data + token * x.stride * element_bytes(),
        .x_stride = x.stride,
        .tokens = tokens,
    };
    lanes.multiply[static_cast<int>(format.type)](product, expanded, sums);
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

// Some tokens of one expert; `first` counts from the start of the group.
struct Piece {
  const Weight *up, *down;
  int64_t first, tokens;
};

// Some rows of a piece's weight times some of its tokens.
struct Unit {
  int64_t piece, row, rows, token, tokens;
};

std::vector<Unit> units_of(const std::vector<Piece>& pieces, int64_t rows, int64_t most_rows) {
  std::vector<Unit> units;
  for (size_t p = 0; p < pieces.size(); ++p) {
    const int64_t some = pieces[p].tokens <= kFewTokens ? most_rows / 2 : most_rows;
    for (int64_t r = 0; r < rows; r += some)
      for (int64_t t = 0; t < pieces[p].tokens; t += kUnitTokens)
        units.push_back({static_cast<int64_t>(p), r, std::min(some, rows - r), pieces[p].first + t,
                         std::min(kUnitTokens, pieces[p].tokens - t)});
  }
  return units;
}

struct Worker {
  char* expanded;
  float* sums;

  static constexpr int64_t kBytes = kExpandedBytes + kSumsBytes;
  explicit Worker(char* room) : expanded(room), sums(reinterpret_cast<float*>(room + kExpandedBytes)) {}
};

// out = x W^T + bias, for every piece its own weight.
void project(const Products& products, const std::vector<Piece>& pieces, const Weight* Piece::* weight_of,
             const Elements& x, const Tokens& tokens, int64_t first_token, char* workers, int threads) {
  const std::vector<Unit> units = units_of(pieces, products.format.rows, kUnitRows);
  const auto store = products.lanes.store[static_cast<int>(tokens.type)];
  const int64_t bytes = dtype_bytes(tokens.type);
  char* out = static_cast<char*>(tokens.out) + first_token * tokens.out_stride * bytes;
  parallel_for(threads, static_cast<int64_t>(units.size()), [&](int64_t i, int worker) {
    const Unit& unit = units[i];
    const Worker own(workers + worker * Worker::kBytes);
    const Weight& weight = *(pieces[unit.piece].*weight_of);
    float bias[kUnitRows] = {};
    products.read_bias(weight, unit.row, unit.rows, bias);
    for (int64_t t = unit.token, end = unit.token + unit.tokens; t < end; t += kTokenBlock) {
      const int64_t some = std::min(kTokenBlock, end - t);
      std::memset(own.sums, 0, kSumsBytes);
      products.multiply(weight, unit.row, unit.rows, x, t, some, own.expanded, own.sums);
      store(own.sums, bias, unit.rows, some, out + (t * tokens.out_stride + unit.row) * bytes, tokens.out_stride);
    }
  });
}

// out = activation(x gate^T + bias, x up^T + bias), rounded to the type of x, as elements of `next`.
void gate_and_up(const Products& products, const Products& next, const std::vector<Piece>& pieces, const Elements& x,
                 Activation activation, DType type, const Elements& out, char* workers, int threads) {
  const int64_t inner = products.format.rows / 2, bytes = next.element_bytes();
  const std::vector<Unit> units = units_of(pieces, inner, kUpColumn);
  const auto activate = next.lanes.activate[static_cast<int>(type)];
  parallel_for(threads, static_cast<int64_t>(units.size()), [&](int64_t i, int worker) {
    const Unit& unit = units[i];
    const Worker own(workers + worker * Worker::kBytes);
    const Weight& weight = *pieces[unit.piece].up;
    float bias[kUnitRows] = {};
    products.read_bias(weight, unit.row, unit.rows, bias);
    products.read_bias(weight, inner + unit.row, unit.rows, bias + kUpColumn);
    for (int64_t t = unit.token, end = unit.token + unit.tokens; t < end; t += kTokenBlock) {
      const int64_t some = std::min(kTokenBlock, end - t);
      std::memset(own.sums, 0, kSumsBytes);
      products.multiply(weight, unit.row, unit.rows, x, t, some, own.expanded, own.sums);
      products.multiply(weight, inner + unit.row, unit.rows, x, t, some, own.expanded, own.sums + kUpColumn);
      activate(activation, own.sums, bias, unit.rows, some, out.data + (t * out.stride + unit.row) * bytes, out.stride);
    }
  });
}

// From row `first` of x on, whole experts as long as the group has room, of a large one what fits; returns their rows.
int64_t next_group(const ExpertArgs& args, int64_t first, int64_t& expert, std::vector<Piece>& pieces) {
  int64_t rows = 0;
  pieces.clear();
  while (expert < args.experts && rows < kGroupTokens) {
    const int64_t left = args.offsets[expert + 1] - (first + rows);
    if (left > kGroupTokens - rows && rows > 0) break;
    const int64_t some = std::min(left, kGroupTokens);
    if (some > 0) pieces.push_back({args.up + expert, args.down + expert, rows, some});
    rows += some;
    if (some == left) ++expert;
  }
  return rows;
}

Workspace& workspace() {
  thread_local Workspace own;
  return own;
}

}  // namespace

void linear(const LinearArgs& args) {
  const Tokens& tokens = args.tokens;
  const Products products(tokens.type, args.format);
  const int64_t most = std::min(tokens.count, kGroupTokens);
  const int64_t x_bytes = products.takes(tokens) ? 0 : products.room(most);
  char* room = workspace().bytes(x_bytes + args.threads * Worker::kBytes);
  for (int64_t first = 0; first < tokens.count; first += kGroupTokens) {
    const int64_t count = std::min(kGroupTokens, tokens.count - first);
    const Elements x = products.prepare(tokens, first, count, room, args.threads);
    const std::vector<Piece> pieces = {{&args.weight, nullptr, 0, count}};
    project(products, pieces, &Piece::up, x, tokens, first, room + x_bytes, args.threads);
  }
}

void expert_ffn(const ExpertArgs& args) {
  const Tokens& tokens = args.tokens;
  const Products up(tokens.type, args.up_format), down(tokens.type, args.down_format);
  const int64_t most = std::min(tokens.count, kGroupTokens);
  const int64_t x_bytes = up.takes(tokens) ? 0 : up.room(most), inner_bytes = down.room(most);
  char* room = workspace().bytes(x_bytes + inner_bytes + args.threads * Worker::kBytes);
  char* const workers = room + x_bytes + inner_bytes;
  const Elements inner = {room + x_bytes, down.padded_depth()};
  if (down.padded_depth() != down.format.depth) std::memset(inner.data, 0, static_cast<size_t>(inner_bytes));
  std::vector<Piece> pieces;
  for (int64_t first = 0, expert = 0, rows; first < tokens.count; first += rows) {
    rows = next_group(args, first, expert, pieces);
    const Elements x = up.prepare(tokens, first, rows, room, args.threads);
    gate_and_up(up, down, pieces, x, args.activation, tokens.type, inner, workers, args.threads);
    project(down, pieces, &Piece::down, inner, tokens, first, workers, args.threads);
  }
}

}  // namespace moelight
