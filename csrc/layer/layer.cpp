// The order of a layer's kernels, and the memory between them. Does not depend on any instruction set.

#include "layer.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "moelight/workspace.h"
#include "norm/norm.h"
#include "route/route.h"

namespace moelight {
namespace {

// Pieces of one workspace of the calling thread, one after the other; those of a copy begin where it was copied.
class WorkspaceParts {
 public:
  explicit WorkspaceParts(int64_t bytes) {
    thread_local Workspace memory;
    next_ = memory.bytes(bytes);
  }

  template <class T = void>
  T* take(int64_t bytes) {
    char* const here = next_;
    next_ += Workspace::aligned(bytes);
    return reinterpret_cast<T*>(here);
  }

 private:
  char* next_;
};

template <class T>
void widen_rows(const Activations& x, int64_t columns, float* to) {
  for (int64_t t = 0; t < x.tokens; ++t) {
    const T* const row = static_cast<const T*>(x.data) + t * x.stride;
    for (int64_t c = 0; c < columns; ++c) to[t * columns + c] = to_float(row[c]);
  }
}

template <class T>
void narrow_rows(const float* from, int64_t columns, const Activations& to) {
  for (int64_t t = 0; t < to.tokens; ++t) {
    T* const row = static_cast<T*>(to.data) + t * to.stride;
    for (int64_t c = 0; c < columns; ++c) from_float(from[t * columns + c], row[c]);
  }
}

template <class T>
void add_rows(const Activations& x, int64_t columns, const Activations& add) {
  for (int64_t t = 0; t < x.tokens; ++t) {
    T* const row = static_cast<T*>(x.data) + t * x.stride;
    const T* const more = static_cast<const T*>(add.data) + t * add.stride;
    for (int64_t c = 0; c < columns; ++c) from_float(to_float(row[c]) + to_float(more[c]), row[c]);
  }
}

// Calls `function` with a null pointer to the type of numbers of `dtype`.
template <class Function>
void with_type(DType dtype, const Function& function) {
  if (dtype == DType::kFloat32) return function(static_cast<float*>(nullptr));
  if (dtype == DType::kBFloat16) return function(static_cast<Bf16*>(nullptr));
  function(static_cast<Fp16*>(nullptr));
}

// `columns` numbers of every token of x in float32, one after the other.
void widen(DType dtype, const Activations& x, int64_t columns, float* to) {
  with_type(dtype, [&](auto* type) { widen_rows<std::remove_pointer_t<decltype(type)>>(x, columns, to); });
}

void narrow(DType dtype, const float* from, int64_t columns, const Activations& to) {
  with_type(dtype, [&](auto* type) { narrow_rows<std::remove_pointer_t<decltype(type)>>(from, columns, to); });
}

// x += add.
void add(const Layer& layer, const Activations& x, const Activations& more) {
  with_type(layer.dtype, [&](auto* type) { add_rows<std::remove_pointer_t<decltype(type)>>(x, layer.hidden, more); });
}

void multiply(const LayerProduct& projection, DType type, const Activations& x, const Activations& out,
              WorkspaceParts pieces, int threads) {
  const int64_t depth = projection.parts.front().format.depth, rows = projection.rows();
  Activations from = x, to = out;
  if (projection.wide) {
    from = {pieces.take(4 * x.tokens * depth), x.tokens, depth};
    to = {pieces.take(4 * x.tokens * rows), x.tokens, rows};
    widen(type, x, depth, static_cast<float*>(from.data));
  }
  const DType computed = projection.wide ? DType::kFloat32 : type;
  auto* columns = static_cast<char*>(to.data);
  for (LinearArgs args : projection.parts) {
    args.tokens = {computed, x.tokens, from.data, from.stride, columns, to.stride};
    args.threads = threads;
    linear(args);
    columns += args.format.rows * dtype_bytes(computed);
  }
  if (projection.wide) narrow(type, static_cast<const float*>(to.data), rows, out);
}

void norm_rows(DType dtype, const Layer& layer, const void* weight, int64_t groups, int64_t size, const Activations& x,
               const Activations& add, const Activations& out, int threads) {
  rms_norm({.dtype = dtype,
            .tokens = x.tokens,
            .groups = groups,
            .hidden = size,
            .x = x.data,
            .x_stride = x.stride,
            .add = add.data,
            .add_stride = add.stride,
            .weight = weight,
            .gate = nullptr,
            .gate_stride = 0,
            .eps = layer.eps,
            .out = out.data,
            .out_stride = out.stride,
            .threads = threads});
}

// out = norm(x += more), in groups of `size` numbers; `more` without data adds nothing.
void normalise(const Layer& layer, const Norm& norm, int64_t groups, int64_t size, const Activations& x,
               const Activations& more, const Activations& out, WorkspaceParts pieces, int threads) {
  if (!norm.once || layer.dtype == DType::kFloat32)
    return norm_rows(layer.dtype, layer, norm.weight, groups, size, x, more, out, threads);
  if (more.data != nullptr) add(layer, x, more);
  const int64_t columns = groups * size;
  const Activations wide = {pieces.take(4 * x.tokens * columns), x.tokens, columns};
  widen(layer.dtype, x, columns, static_cast<float*>(wide.data));
  norm_rows(DType::kFloat32, layer, norm.weight, groups, size, wide, {}, wide, threads);
  narrow(layer.dtype, static_cast<const float*>(wide.data), columns, out);
}

Activations part(const Layer& layer, const Activations& x, int64_t first_head) {
  return {static_cast<char*>(x.data) + first_head * layer.head_dim * dtype_bytes(layer.dtype), x.tokens, x.stride};
}

// The experts of every token, and its rows sorted by them.
struct Routing {
  float* weights;
  int32_t *ids, *order, *token, *position, *offsets;
};

void choose(const Layer& layer, const void* logits, int64_t tokens, int64_t experts, const Routing& to, int threads) {
  route({.dtype = layer.dtype,
         .tokens = tokens,
         .experts = experts,
         .top_k = layer.top_k,
         .logits = logits,
         .stride = experts,
         .normalize = layer.normalize,
         .round = layer.round,
         .weights = to.weights,
         .ids = to.ids,
         .threads = threads});
  sort_by_expert({.tokens = tokens,
                  .experts = experts,
                  .top_k = layer.top_k,
                  .ids = to.ids,
                  .stride = layer.top_k,
                  .order = to.order,
                  .token = to.token,
                  .position = to.position,
                  .offsets = to.offsets});
}

// out [T, H] += the experts of x [T, H]; rows [T k, H].
void add_experts(const Layer& layer, const Activations& x, const Activations& out, ExpertArgs experts,
                 const Routing& routing, char* rows, int threads) {
  const int64_t count = x.tokens * layer.top_k, bytes = layer.hidden * dtype_bytes(layer.dtype);
  gather_rows({.row_bytes = bytes,
               .rows = count,
               .x = static_cast<const char*>(x.data),
               .x_stride = x.stride * dtype_bytes(layer.dtype),
               .token = routing.token,
               .out = rows,
               .out_stride = bytes,
               .threads = threads});
  experts.tokens = {layer.dtype, count, rows, layer.hidden, rows, layer.hidden};
  experts.offsets = routing.offsets, experts.threads = threads;
  expert_ffn(experts);
  scatter_sum({.dtype = layer.dtype,
               .tokens = x.tokens,
               .top_k = layer.top_k,
               .hidden = layer.hidden,
               .rows = rows,
               .row_stride = layer.hidden,
               .position = routing.position,
               .position_stride = layer.top_k,
               .weights = routing.weights,
               .weight_stride = layer.top_k,
               .out = out.data,
               .out_stride = out.stride,
               .residual = true,
               .threads = threads});
}

// out [T, H] += the only expert of x [T, H], which is overwritten.
void add_block(const Layer& layer, const Activations& x, const Activations& out, ExpertArgs experts,
               WorkspaceParts pieces, int threads) {
  const int32_t offsets[] = {0, static_cast<int32_t>(x.tokens)};
  const DType computed = layer.wide_block ? DType::kFloat32 : layer.dtype;
  const Activations rows = {pieces.take(x.tokens * layer.hidden * dtype_bytes(computed)), x.tokens, layer.hidden};
  if (layer.wide_block) widen(layer.dtype, x, layer.hidden, static_cast<float*>(rows.data));
  const Activations& from = layer.wide_block ? rows : x;
  experts.tokens = {computed, x.tokens, from.data, from.stride, rows.data, rows.stride};
  experts.offsets = offsets, experts.threads = threads;
  expert_ffn(experts);
  if (layer.wide_block) narrow(layer.dtype, static_cast<const float*>(rows.data), layer.hidden, x);
  const Activations& result = layer.wide_block ? x : rows;
  if (layer.block_norm.weight != nullptr)
    normalise(layer, layer.block_norm, 1, layer.hidden, result, {}, result, pieces, threads);
  add(layer, out, result);
}

int64_t row_bytes(const Layer& layer) { return layer.hidden * dtype_bytes(layer.dtype); }

// What `multiply` and `normalise` take of a workspace at most: tokens and results in float32.
int64_t workspace_wide(const Layer& layer, int64_t tokens) {
  const int64_t rows = layer.qkv.rows(), attended = layer.queries * layer.head_dim;
  return Workspace::aligned(4 * tokens * std::max(layer.hidden, attended)) +
         Workspace::aligned(4 * tokens * std::max(layer.hidden, rows));
}

int64_t workspace_before(const Layer& layer, int64_t tokens) {
  return Workspace::aligned(tokens * row_bytes(layer)) + workspace_wide(layer, tokens);
}

void before(const Layer& layer, const Activations& hidden, const Rotation& rotation, const Activations& qkv,
            WorkspaceParts pieces, int threads) {
  const Activations x = {pieces.take(hidden.tokens * row_bytes(layer)), hidden.tokens, layer.hidden};
  normalise(layer, layer.input_norm, 1, layer.hidden, hidden, {}, x, pieces, threads);
  multiply(layer.qkv, layer.dtype, x, qkv, pieces, threads);
  if (layer.q_norm.weight != nullptr) {
    const Activations keys = part(layer, qkv, layer.queries);
    const int64_t head_dim = layer.head_dim, queries = layer.queries, count = layer.keys;
    const bool all = layer.norms_all;
    normalise(layer, layer.q_norm, all ? 1 : queries, all ? queries * head_dim : head_dim, qkv, {}, qkv, pieces,
              threads);
    normalise(layer, layer.k_norm, all ? 1 : count, all ? count * head_dim : head_dim, keys, {}, keys, pieces, threads);
  }
  rotate({.dtype = layer.dtype,
          .tokens = qkv.tokens,
          .heads = layer.queries + layer.keys,
          .head_dim = layer.head_dim,
          .x = qkv.data,
          .x_stride = qkv.stride,
          .cos = rotation.cos,
          .sin = rotation.sin,
          .cos_stride = rotation.cos_stride,
          .sin_stride = rotation.sin_stride,
          .out = qkv.data,
          .out_stride = qkv.stride,
          .threads = threads});
}

// out [T, Hq D] = the attention of the queries of qkv over the cache, to which its keys and values are added.
void attend(const Layer& layer, const Activations& qkv, GqaArgs cache, const Activations& out, int threads) {
  cache.q = qkv.data, cache.q_stride = qkv.stride;
  cache.k_new = part(layer, qkv, layer.queries).data, cache.k_new_stride = qkv.stride;
  cache.v_new = part(layer, qkv, layer.queries + layer.keys).data, cache.v_new_stride = qkv.stride;
  cache.out = out.data, cache.out_stride = out.stride;
  cache.threads = threads;
  gqa_decode(cache);
}

int64_t workspace_after(const Layer& layer, int64_t tokens, int64_t experts) {
  const int64_t rows = 2 * Workspace::aligned(tokens * row_bytes(layer)) + workspace_wide(layer, tokens);
  if (layer.dense()) return rows + Workspace::aligned(4 * tokens * layer.hidden);
  return rows + Workspace::aligned(tokens * experts * dtype_bytes(layer.dtype)) +
         5 * Workspace::aligned(4 * tokens * layer.top_k) + Workspace::aligned(4 * (experts + 1));
}

// out [T, H] += the chosen experts of x [T, H].
void add_chosen(const Layer& layer, const Activations& x, const Activations& out, const ExpertArgs& experts,
                const Activations& rows, WorkspaceParts pieces, int threads) {
  const int64_t tokens = x.tokens, index = 4 * tokens * layer.top_k;
  const Activations logits = {pieces.take(tokens * experts.experts * dtype_bytes(layer.dtype)), tokens,
                              experts.experts};
  const Routing routing = {.weights = pieces.take<float>(index),
                           .ids = pieces.take<int32_t>(index),
                           .order = pieces.take<int32_t>(index),
                           .token = pieces.take<int32_t>(index),
                           .position = pieces.take<int32_t>(index),
                           .offsets = pieces.take<int32_t>(4 * (experts.experts + 1))};
  multiply(layer.router, layer.dtype, x, logits, pieces, threads);
  choose(layer, logits.data, tokens, experts.experts, routing, threads);
  for (int64_t e = 0; e < experts.experts; ++e)
    if (routing.offsets[e + 1] > routing.offsets[e] && !experts.down[e].present())
      throw std::out_of_range("experts: " + std::to_string(e) + " has tokens and None");
  add_experts(layer, x, out, experts, routing, static_cast<char*>(rows.data), threads);
}

void after(const Layer& layer, const Activations& hidden, const Activations& attention, const ExpertArgs& experts,
           const Activations& rows, WorkspaceParts pieces, int threads) {
  const int64_t tokens = hidden.tokens, row = row_bytes(layer);
  const Activations projected = {pieces.take(tokens * row), tokens, layer.hidden};
  const Activations x = {pieces.take(tokens * row), tokens, layer.hidden};
  multiply(layer.o, layer.dtype, attention, projected, pieces, threads);
  if (layer.attention_norm.weight != nullptr)
    normalise(layer, layer.attention_norm, 1, layer.hidden, projected, {}, projected, pieces, threads);
  normalise(layer, layer.post_norm, 1, layer.hidden, hidden, projected, x, pieces, threads);
  if (layer.dense()) return add_block(layer, x, hidden, experts, pieces, threads);
  add_chosen(layer, x, hidden, experts, rows, pieces, threads);
}

}  // namespace

void before_attention(const Layer& layer, const Activations& hidden, const Rotation& rotation, const Activations& qkv,
                      int threads) {
  before(layer, hidden, rotation, qkv, WorkspaceParts(workspace_before(layer, hidden.tokens)), threads);
}

void after_attention(const Layer& layer, const Activations& hidden, const Activations& attention,
                     const ExpertArgs& experts, const Activations& rows, int threads) {
  after(layer, hidden, attention, experts, rows, WorkspaceParts(workspace_after(layer, hidden.tokens, experts.experts)),
        threads);
}

void decode_layer(const Layer& layer, const Activations& hidden, const Rotation& rotation, const GqaArgs& cache,
                  const ExpertArgs& experts, const Activations& rows, int threads) {
  const int64_t tokens = hidden.tokens, columns = layer.qkv.rows(), attended = layer.queries * layer.head_dim;
  const int64_t qkv_bytes = tokens * columns * dtype_bytes(layer.dtype);
  const int64_t out_bytes = tokens * attended * dtype_bytes(layer.dtype);
  WorkspaceParts pieces(Workspace::aligned(qkv_bytes) + Workspace::aligned(out_bytes) +
                        std::max(workspace_before(layer, tokens), workspace_after(layer, tokens, experts.experts)));
  const Activations qkv = {pieces.take(qkv_bytes), tokens, columns};
  const Activations attention = {pieces.take(out_bytes), tokens, attended};
  before(layer, hidden, rotation, qkv, pieces, threads);
  attend(layer, qkv, cache, attention, threads);
  after(layer, hidden, attention, experts, rows, pieces, threads);
}

}  // namespace moelight
