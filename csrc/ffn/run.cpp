// Cuts linear layers and experts into units, hands them to the threads, and keeps the intermediate in cache. Does not
// depend on instruction set.

#include <algorithm>
#include <cstring>
#include <vector>

#include "ffn.h"
#include "moelight/cpu.h"
#include "moelight/workspace.h"
#include "work.h"

namespace moelight {
namespace {

// Rows that pass through a layer together; what lies between two products is no longer than this.
constexpr int64_t kGroupTokens = 512;
// Tokens that a unit multiplies with its rows, kTokenBlock at a time.
constexpr int64_t kUnitTokens = 4 * kTokenBlock;
// With no more tokens than this a unit is a stretch of memory to read, of about kUnitBytes.
constexpr int64_t kFewTokens = 24;
constexpr int64_t kUnitBytes = 256 << 10;
// Tokens that one thread prepares at a time.
constexpr int64_t kPreparedTokens = 32;
// Less work than this is done before a second thread wakes: bytes to read, and products to sum.
constexpr int64_t kSmallBytes = 128 << 10, kSmallProducts = 1 << 20;

Kernel kernel_for(DType x, WeightType weight) {
#if defined(__x86_64__)
  switch (active_isa()) {
    case Isa::kAvx512:
      if (x == DType::kBFloat16 && weight != WeightType::kFloat32 && weight != WeightType::kFloat16) {
        switch (bf16_products()) {
          case Bf16Products::kPairs:
            return ffn_avx512_dots(weight);
          case Bf16Products::kTiles:
            return ffn_amx(weight);
          case Bf16Products::kEmulated:
            return ffn_emulated(weight);
          default:
            break;
        }
      }
      return ffn_avx512(x, weight);
    case Isa::kAvx2:
      return ffn_avx2(x, weight);
    case Isa::kScalar:
      break;
  }
#endif
  return ffn_scalar(x, weight);
}

int64_t rounded_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// Rows of bytes.
struct Span {
  char* data;
  int64_t stride;
  char* row(int64_t i) const { return data + i * stride; }
};

// One kind of product: its kernel, and the tokens that enter it as they come and as they are multiplied.
struct Side {
  Kernel kernel;
  Format format;
  DType type;
  bool in_place = false;
  Span source = {}, prepared = {};

  Side(DType type, const Format& format) : kernel(kernel_for(type, format.type)), format(format), type(type) {}

  bool takes(int64_t depth) const { return kernel.in_place && depth % kernel.step == 0; }
  int64_t prepared_bytes() const {
    return kernel.head_bytes + rounded_up(format.depth, kernel.step) * kernel.element_bytes;
  }
  // Of `tokens` in at most `pieces` experts.
  int64_t room(int64_t tokens, int64_t pieces) const {
    if (takes(format.depth)) return 0;
    const int64_t most = std::min(tokens + pieces * (kernel.token_step - 1), tokens * kernel.token_step);
    return Workspace::aligned(most * prepared_bytes());
  }

  // Where the tokens come from, and where `room` bytes for the prepared ones are.
  void enter(const Span& from, char* room) {
    in_place = takes(format.depth);
    source = from;
    prepared = in_place ? from : Span{room, prepared_bytes()};
  }

  void prepare(int64_t from, int64_t to, int64_t count) const {
    kernel.prepare(source.row(from), source.stride, count, format.depth, prepared.row(to));
  }

  void multiply(const Weight& weight, int64_t row, int64_t rows, int64_t token, int64_t tokens, const Span& next,
                char* scratch, float* sums) const {
    const Product product = {
        .weight = static_cast<const char*>(weight.data) + row * weight.row_bytes,
        .row_bytes = weight.row_bytes,
        .scale = weight.scale == nullptr ? nullptr : weight.scale + row * format.groups,
        .group = format.group,
        .groups = format.groups,
        .rows = rows,
        .depth = format.depth,
        .x = prepared.row(token),
        .x_bytes = prepared.stride,
        .tokens = tokens,
        .next = next.data,
        .next_bytes = next.stride,
    };
    kernel.multiply(product, scratch, sums);
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

// Some tokens of one expert. `first` counts rows of x and of the intermediate from the start of the group, `place`
// prepared tokens.
struct Piece {
  const Weight *up, *down;
  int64_t first, tokens, place_up, place_down;
};

// What one thread multiplies with.
struct Worker {
  float* sums;
  char* scratch;

  static constexpr int64_t kSumsBytes = kTokenBlock * kUnitRows * static_cast<int64_t>(sizeof(float));
  static int64_t bytes(int64_t scratch) { return kSumsBytes + Workspace::aligned(scratch); }
};

// One group of tokens on its way through one product or two. A linear layer is a group without an up side.
class Group {
 public:
  Group(const std::vector<Piece>& pieces, const Side* up, const Side& down, Activation activation, const Span& inner,
        const Span& out, char* workers, int64_t worker_bytes)
      : pieces_(pieces),
        up_(up),
        down_(down),
        activation_(activation),
        inner_(inner),
        out_(out),
        workers_(workers),
        worker_bytes_(worker_bytes) {}

  void run(int threads) {
    Work work(static_cast<int64_t>(pieces_.size()));
    const int64_t useful = small() ? 1 : threads;
    if (up_ != nullptr) {
      add_preparation(work, *up_, kPrepareX);
      add_products(work, up_->format.rows / 2, 2, kUp, useful);
    }
    add_preparation(work, down_, kPrepareInner);
    add_products(work, down_.format.rows, 1, kDown, useful);
    work.run(static_cast<int>(useful), [this](const Unit& unit, const Unit* next, int worker) {
      char* const room = workers_ + worker * worker_bytes_;
      const Worker own = {reinterpret_cast<float*>(room), room + Worker::kSumsBytes};
      const Piece& piece = pieces_[static_cast<size_t>(unit.piece)];
      switch (unit.stage) {
        case kPrepareX:
          return up_->prepare(piece.first + unit.token, piece.place_up + unit.token, unit.tokens);
        case kUp:
          return gate_and_up(unit, piece, next, own);
        case kPrepareInner:
          return down_.prepare(piece.first + unit.token, piece.place_down + unit.token, unit.tokens);
        case kDown:
          return project(unit, piece, next, own);
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

  void add_preparation(Work& work, const Side& side, Stage stage) const {
    if (side.in_place) return;
    for (size_t p = 0; p < pieces_.size(); ++p)
      for (int64_t t = 0; t < pieces_[p].tokens; t += kPreparedTokens)
        work.add({stage, static_cast<int32_t>(p), 0, 0, t, std::min(kPreparedTokens, pieces_[p].tokens - t)});
  }

  // `rows` of each piece, of which each stands for `each` rows of the weight.
  void add_products(Work& work, int64_t rows, int64_t each, Stage stage, int64_t threads) const {
    const int64_t step = kUnitRows / each, all = rows * static_cast<int64_t>(pieces_.size());
    for (size_t p = 0; p < pieces_.size(); ++p) {
      const Piece& piece = pieces_[p];
      int64_t some = step;
      if (piece.tokens <= kFewTokens) {
        const int64_t bytes = each * (stage == kUp ? piece.up : piece.down)->row_bytes;
        const int64_t fair = rounded_up(all / (threads * 8) + 1, step);
        some = std::max<int64_t>(std::min(fair, kUnitBytes / std::max<int64_t>(bytes, 1) / step * step), step / 2);
      }
      for (int64_t r = 0; r < rows; r += some)
        for (int64_t t = 0; t < piece.tokens; t += kUnitTokens)
          work.add({stage, static_cast<int32_t>(p), r, std::min(some, rows - r), t,
                    std::min(kUnitTokens, piece.tokens - t)});
    }
  }

  // The first rows of the weight that a unit reads.
  Span first_rows(const Unit* unit) const {
    if (unit == nullptr || unit->stage == kPrepareX || unit->stage == kPrepareInner) return {nullptr, 0};
    const Piece& piece = pieces_[static_cast<size_t>(unit->piece)];
    return rows_of(unit->stage == kUp ? *piece.up : *piece.down, unit->row);
  }

  static Span rows_of(const Weight& weight, int64_t row) {
    return {const_cast<char*>(static_cast<const char*>(weight.data)) + row * weight.row_bytes, weight.row_bytes};
  }

  // activation(x gate^T + bias, x up^T + bias), rounded to the type of x.
  void gate_and_up(const Unit& unit, const Piece& piece, const Unit* next, const Worker& own) const {
    const int64_t inner = up_->format.rows / 2, end = unit.row + unit.rows;
    const int64_t bytes = dtype_bytes(up_->type), count = blocks(unit.tokens);
    for (int64_t row = unit.row; row < end; row += kUpColumn) {
      const int64_t rows = std::min(kUpColumn, end - row);
      const Span after = row + rows < end ? rows_of(*piece.up, row + rows) : first_rows(next);
      float bias[kUnitRows] = {};
      up_->read_bias(*piece.up, row, rows, bias);
      up_->read_bias(*piece.up, inner + row, rows, bias + kUpColumn);
      for (int64_t b = 0; b < count; ++b) {
        const int64_t t = unit.token + cut(unit.tokens, count, b),
                      some = cut(unit.tokens, count, b + 1) - (t - unit.token);
        const int64_t place = piece.place_up + t;
        std::memset(own.sums, 0, static_cast<size_t>(some * kUnitRows) * sizeof(float));
        up_->multiply(*piece.up, row, rows, place, some, rows_of(*piece.up, inner + row), own.scratch, own.sums);
        up_->multiply(*piece.up, inner + row, rows, place, some, b + 1 < count ? rows_of(*piece.up, row) : after,
                      own.scratch, own.sums + kUpColumn);
        up_->kernel.activate(activation_, own.sums, bias, rows, some, inner_.row(piece.first + t) + row * bytes,
                             inner_.stride / bytes);
      }
    }
  }

  // x W^T + bias, rounded to the type of x.
  void project(const Unit& unit, const Piece& piece, const Unit* next, const Worker& own) const {
    const int64_t bytes = dtype_bytes(down_.type), end = unit.row + unit.rows, count = blocks(unit.tokens);
    for (int64_t row = unit.row; row < end; row += kUnitRows) {
      const int64_t rows = std::min(kUnitRows, end - row);
      const Span after = row + rows < end ? rows_of(*piece.down, row + rows) : first_rows(next);
      float bias[kUnitRows] = {};
      down_.read_bias(*piece.down, row, rows, bias);
      for (int64_t b = 0; b < count; ++b) {
        const int64_t t = unit.token + cut(unit.tokens, count, b),
                      some = cut(unit.tokens, count, b + 1) - (t - unit.token);
        std::memset(own.sums, 0, static_cast<size_t>(some * kUnitRows) * sizeof(float));
        down_.multiply(*piece.down, row, rows, piece.place_down + t, some, after, own.scratch, own.sums);
        down_.kernel.store(own.sums, bias, rows, some, out_.row(piece.first + t) + row * bytes, out_.stride / bytes);
      }
    }
  }

  // Token blocks of nearly equal size that begin at multiples of a tile's sixteen.
  static int64_t blocks(int64_t tokens) { return (tokens + kTokenBlock - 1) / kTokenBlock; }
  static int64_t cut(int64_t tokens, int64_t count, int64_t i) {
    return std::min(tokens, rounded_up(tokens * i / count, 16));
  }

  const std::vector<Piece>& pieces_;
  const Side* up_;
  const Side& down_;
  Activation activation_;
  Span inner_, out_;
  char* workers_;
  int64_t worker_bytes_;
};

// From row `first` of x on, whole experts as long as the group has room, of a large one what fits; returns their rows.
int64_t next_group(const ExpertArgs& args, const Side& up, const Side& down, int64_t first, int64_t& expert,
                   std::vector<Piece>& pieces) {
  int64_t rows = 0, place_up = 0, place_down = 0;
  pieces.clear();
  while (expert < args.experts && rows < kGroupTokens) {
    const int64_t left = args.offsets[expert + 1] - (first + rows);
    if (left > kGroupTokens - rows && rows > 0) break;
    const int64_t some = std::min(left, kGroupTokens);
    if (some > 0)
      pieces.push_back({args.up + expert, args.down + expert, rows, some, up.takes(up.format.depth) ? rows : place_up,
                        down.takes(down.format.depth) ? rows : place_down});
    rows += some;
    place_up += rounded_up(some, up.kernel.token_step), place_down += rounded_up(some, down.kernel.token_step);
    if (some == left) ++expert;
  }
  return rows;
}

Workspace& workspace() {
  thread_local Workspace own;
  return own;
}

// What a call works in, one after the other.
struct Rooms {
  int64_t x, inner, prepared, worker;
  int64_t total(int threads) const { return x + inner + prepared + threads * worker; }
};

Rooms rooms_of(const Side* up, const Side& down, int64_t tokens, int64_t experts) {
  const int64_t most = std::min(tokens, kGroupTokens), pieces = std::min(most, experts);
  const int64_t scratch = std::max(down.kernel.scratch_bytes, up == nullptr ? 0 : up->kernel.scratch_bytes);
  return {.x = up == nullptr ? 0 : up->room(most, pieces),
          .inner = up == nullptr ? 0 : Workspace::aligned(most * down.format.depth * dtype_bytes(down.type)),
          .prepared = down.room(most, pieces),
          .worker = Worker::bytes(scratch)};
}

}  // namespace

void linear(const LinearArgs& args) {
  const Tokens& tokens = args.tokens;
  const int64_t bytes = dtype_bytes(tokens.type);
  Side side(tokens.type, args.format);
  const Rooms rooms = rooms_of(nullptr, side, tokens.count, 1);
  char* const room = workspace().bytes(rooms.total(args.threads));
  const Span x = {const_cast<char*>(static_cast<const char*>(tokens.x)), tokens.x_stride * bytes};
  const Span out = {static_cast<char*>(tokens.out), tokens.out_stride * bytes};
  for (int64_t first = 0; first < tokens.count; first += kGroupTokens) {
    side.enter({x.row(first), x.stride}, room);
    const std::vector<Piece> pieces = {{nullptr, &args.weight, 0, std::min(kGroupTokens, tokens.count - first), 0, 0}};
    Group(pieces, nullptr, side, Activation::kSilu, {}, {out.row(first), out.stride}, room + rooms.prepared,
          rooms.worker)
        .run(args.threads);
  }
}

void expert_ffn(const ExpertArgs& args) {
  const Tokens& tokens = args.tokens;
  const int64_t bytes = dtype_bytes(tokens.type);
  Side up(tokens.type, args.up_format), down(tokens.type, args.down_format);
  const Rooms rooms = rooms_of(&up, down, tokens.count, args.experts);
  char* const room = workspace().bytes(rooms.total(args.threads));
  const Span inner = {room + rooms.x, args.down_format.depth * bytes};
  char* const prepared = inner.data + rooms.inner;
  const Span x = {const_cast<char*>(static_cast<const char*>(tokens.x)), tokens.x_stride * bytes};
  const Span out = {static_cast<char*>(tokens.out), tokens.out_stride * bytes};
  std::vector<Piece> pieces;
  for (int64_t first = 0, expert = 0, rows; first < tokens.count; first += rows) {
    rows = next_group(args, up, down, first, expert, pieces);
    up.enter({x.row(first), x.stride}, room);
    down.enter(inner, prepared);
    Group(pieces, &up, down, args.activation, inner, {out.row(first), out.stride}, prepared + rooms.prepared,
          rooms.worker)
        .run(args.threads);
  }
}

int64_t expert_ffn_workspace(DType x, const Format& up, const Format& down, int64_t tokens, int64_t experts,
                             int threads) {
  const Side up_side(x, up), down_side(x, down);
  return rooms_of(&up_side, down_side, tokens, experts).total(threads);
}

int64_t linear_workspace(DType x, const Format& format, int64_t tokens, int threads) {
  return rooms_of(nullptr, Side(x, format), tokens, 1).total(threads);
}

int64_t ffn_workspace_kept() { return workspace().capacity(); }

}  // namespace moelight
