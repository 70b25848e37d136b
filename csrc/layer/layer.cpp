// The order of a layer's kernels, and the memory between them. Does not depend on any instruction set.

#include "layer.h"

#include <algorithm>
#include <stdexcept>
#include <string>

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

void multiply(LinearArgs args, DType type, const Activations& x, const Activations& out, int threads) {
  args.tokens = {type, x.tokens, x.data, x.stride, out.data, out.stride};
  args.threads = threads;
  linear(args);
}

// out = norm(x += add), in groups of `size` numbers; `add` without data adds nothing.
void norm(const Layer& layer, const void* weight, int64_t groups, int64_t size, const Activations& x,
          const Activations& add, const Activations& out, int threads) {
  rms_norm({.dtype = layer.dtype,
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

int64_t row_bytes(const Layer& layer) { return layer.hidden * dtype_bytes(layer.dtype); }

int64_t workspace_before(const Layer& layer, int64_t tokens) { return Workspace::aligned(tokens * row_bytes(layer)); }

void before(const Layer& layer, const Activations& hidden, const Rotation& rotation, const Activations& qkv,
            WorkspaceParts pieces, int threads) {
  const Activations x = {pieces.take(hidden.tokens * row_bytes(layer)), hidden.tokens, layer.hidden};
  norm(layer, layer.input_norm, 1, layer.hidden, hidden, {}, x, threads);
  multiply(layer.qkv, layer.dtype, x, qkv, threads);
  if (layer.q_norm != nullptr) {
    const Activations keys = part(layer, qkv, layer.queries);
    const int64_t head_dim = layer.head_dim, queries = layer.queries, count = layer.keys;
    const bool all = layer.norms_all;
    norm(layer, layer.q_norm, all ? 1 : queries, all ? queries * head_dim : head_dim, qkv, {}, qkv, threads);
    norm(layer, layer.k_norm, all ? 1 : count, all ? count * head_dim : head_dim, keys, {}, keys, threads);
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
  return 2 * Workspace::aligned(tokens * row_bytes(layer)) +
         Workspace::aligned(tokens * experts * dtype_bytes(layer.dtype)) +
         5 * Workspace::aligned(4 * tokens * layer.top_k) + Workspace::aligned(4 * (experts + 1));
}

void after(const Layer& layer, const Activations& hidden, const Activations& attention, const ExpertArgs& experts,
           const Activations& rows, WorkspaceParts pieces, int threads) {
  const int64_t tokens = hidden.tokens, row = row_bytes(layer), index = 4 * tokens * layer.top_k;
  const Activations projected = {pieces.take(tokens * row), tokens, layer.hidden};
  const Activations x = {pieces.take(tokens * row), tokens, layer.hidden};
  const Activations logits = {pieces.take(tokens * experts.experts * dtype_bytes(layer.dtype)), tokens,
                              experts.experts};
  const Routing routing = {.weights = pieces.take<float>(index),
                           .ids = pieces.take<int32_t>(index),
                           .order = pieces.take<int32_t>(index),
                           .token = pieces.take<int32_t>(index),
                           .position = pieces.take<int32_t>(index),
                           .offsets = pieces.take<int32_t>(4 * (experts.experts + 1))};
  multiply(layer.o, layer.dtype, attention, projected, threads);
  norm(layer, layer.post_norm, 1, layer.hidden, hidden, projected, x, threads);
  multiply(layer.router, layer.dtype, x, logits, threads);
  choose(layer, logits.data, tokens, experts.experts, routing, threads);
  for (int64_t e = 0; e < experts.experts; ++e)
    if (routing.offsets[e + 1] > routing.offsets[e] && !experts.down[e].present())
      throw std::out_of_range("experts: " + std::to_string(e) + " has tokens and None");
  add_experts(layer, x, hidden, experts, routing, static_cast<char*>(rows.data), threads);
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
  const int64_t tokens = hidden.tokens, columns = layer.qkv.format.rows, attended = layer.queries * layer.head_dim;
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
