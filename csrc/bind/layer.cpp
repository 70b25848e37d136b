// A decoder layer: weights are checked once, activations at every call. Does not depend on any algorithm.

#include "layer/layer.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <utility>
#include <vector>

#include "ffn.h"
#include "gqa.h"

namespace moelight::bind {
namespace {

using namespace nb::literals;

using MaybeArray = std::optional<In>;

// A layer and the arrays that its weights lie in.
class BoundLayer {
 public:
  // `qkv` and `o`: lists of weights below one another, each with its bias or None and its activations, and whether
  // tokens are widened. `router` None: a dense layer.
  BoundLayer(int dtype, const In& input_norm, const nb::tuple& qkv, const MaybeArray& q_norm, const MaybeArray& k_norm,
             const nb::tuple& o, const MaybeArray& attention_norm, const In& post_norm, nb::handle router,
             const MaybeArray& block_norm, bool wide_block, double eps, int64_t head_dim, int64_t top_k, bool normalize,
             bool round) {
    if (dtype < 0 || dtype >= kDTypes) refuse("dtype", "must be one of float32, bfloat16 and float16");
    layer_.dtype = static_cast<DType>(dtype);
    check_layout("input_norm", input_norm, 1);
    layer_.hidden = static_cast<int64_t>(input_norm.shape(0));
    layer_.eps = static_cast<float>(eps);
    if (head_dim < 2 || head_dim % 2) refuse("head_dim", "must be even, is " + std::to_string(head_dim));
    layer_.head_dim = head_dim;
    layer_.input_norm = norm("input_norm", input_norm, layer_.hidden);
    layer_.post_norm = norm("post_norm", post_norm, layer_.hidden);
    if (attention_norm) layer_.attention_norm = norm("attention_norm", *attention_norm, layer_.hidden);
    if (block_norm) layer_.block_norm = norm("block_norm", *block_norm, layer_.hidden);
    layer_.qkv = projection("qkv", qkv, "qkv_bias", layer_.hidden);
    layer_.o = projection("o", o, "o_bias", -1);
    layer_.wide_block = wide_block;
    const int64_t attended = layer_.o.parts.front().format.depth, rows = layer_.qkv.rows();
    if (layer_.o.rows() != layer_.hidden) refuse("o", "must have as many rows as there are hidden numbers");
    const int64_t keys = (rows - attended) / 2;
    if (attended % head_dim || keys < head_dim || keys % head_dim || attended + 2 * keys != rows)
      refuse("qkv", "must have the rows of queries, keys and values, has " + std::to_string(rows));
    layer_.queries = attended / head_dim, layer_.keys = keys / head_dim;
    if (q_norm.has_value() != k_norm.has_value()) refuse("k_norm", "must come with q_norm");
    layer_.norms_all = q_norm && q_norm->ndim() == 1 && static_cast<int64_t>(q_norm->shape(0)) > head_dim;
    if (q_norm) layer_.q_norm = norm("q_norm", *q_norm, layer_.norms_all ? attended : head_dim);
    if (k_norm) layer_.k_norm = norm("k_norm", *k_norm, layer_.norms_all ? keys : head_dim);
    if (router.is_none()) return;
    layer_.router.parts.push_back(part("router", router, "router", nb::none(), "auto", layer_.hidden));
    if (top_k < 1 || top_k > layer_.router.rows())
      refuse("top_k", "must be from 1 to the number of experts, is " + std::to_string(top_k));
    layer_.top_k = top_k, layer_.normalize = normalize, layer_.round = round;
  }

  BoundLayer(const BoundLayer&) = delete;
  BoundLayer& operator=(const BoundLayer&) = delete;

  void before(const Out& hidden, const In& cos, const In& sin, const Out& qkv, int64_t threads) const {
    const Activations x = this->hidden(hidden);
    const Activations out = rows("qkv", qkv, x.tokens, layer_.qkv.rows());
    const Rotation turns = rotation(cos, sin, x.tokens);
    const int count = checked_threads(threads);
    nb::gil_scoped_release release;
    before_attention(layer_, x, turns, out, count);
  }

  void after(const Out& hidden, const Out& attention, const BoundExperts& experts, const Out& rows,
             int64_t threads) const {
    const Activations x = this->hidden(hidden);
    const Activations attended = this->rows("attention", attention, x.tokens, layer_.queries * layer_.head_dim);
    check_experts(experts.args);
    const Activations buffer = expert_rows(rows, x.tokens);
    const int count = checked_threads(threads);
    nb::gil_scoped_release release;
    after_attention(layer_, x, attended, experts.args, buffer, count);
  }

  void decode(const Activations& hidden, const Rotation& turns, const GqaArgs& cache, const ExpertArgs& experts,
              const Activations& rows, int threads) const {
    GqaArgs paged = cache;
    paged.dtype = layer_.dtype, paged.q_heads = layer_.queries;
    decode_layer(layer_, hidden, turns, paged, experts, rows, threads);
  }

  Activations hidden(const Out& array) const { return rows("hidden", array, -1, layer_.hidden); }

  Rotation rotation(const In& cos, const In& sin, int64_t tokens) const {
    return {angles("cos", cos, tokens), angles("sin", sin, tokens), cos.stride(0), sin.stride(0)};
  }

  void check_cache(const GqaArgs& cache) const {
    if (cache.kv_heads != layer_.keys || cache.head_dim != layer_.head_dim || layer_.queries % layer_.keys)
      refuse("cache", "must have the heads of the layer");
    if (!cache.int8 && cache.dtype != layer_.dtype) refuse("cache", "must have the dtype of the layer");
  }

  void check_experts(const ExpertArgs& args) const {
    const int64_t count = layer_.dense() ? 1 : layer_.router.rows();
    if (args.experts != count || args.down == nullptr)
      refuse("experts", (layer_.dense() ? "must be one, are " : "must be as many as the router has, are ") +
                            std::to_string(args.experts));
    if (args.down_format.rows != layer_.hidden) refuse("experts", "must have the hidden size of the layer");
    if (layer_.dense() && !args.down[0].present()) refuse("experts", "the expert of a dense layer is None");
  }

  Activations expert_rows(const Out& array, int64_t tokens) const {
    const Activations buffer = rows("rows", array, tokens * layer_.top_k, layer_.hidden);
    if (buffer.tokens > 1 && buffer.stride != layer_.hidden) refuse("rows", "must be contiguous");
    return buffer;
  }

 private:
  // Rounded once where the weight is float32 and the layer is not.
  Norm norm(const char* name, const In& array, int64_t size) {
    check_layout(name, array, 1);
    const DType type = float_type(name, array);
    if (type != layer_.dtype && type != DType::kFloat32) refuse(name, "must have the dtype of the layer, or float32");
    check_dim(name, array, 0, size, "size");
    if (size > 1 && array.stride(0) != 1) refuse(name, "must be contiguous");
    arrays_.push_back(array);
    return {array.data(), type != layer_.dtype};
  }

  // Floats have the dtype of the layer.
  LinearArgs part(const char* name, nb::handle weight, const char* bias_name, nb::handle bias,
                  const std::string& activations, int64_t columns) {
    matrices_.push_back(bind_linear(name, weight, bias_name, bias, activations, columns));
    const LinearArgs& args = matrices_.back().args;
    if (args.format.type != WeightType::kQuantized &&
        static_cast<int>(args.format.type) != static_cast<int>(layer_.dtype))
      refuse(name, "must have the dtype of the layer");
    return args;
  }

  LayerProduct projection(const char* name, const nb::tuple& parts, const char* bias_name, int64_t columns) {
    LayerProduct result;
    result.wide = nb::cast<bool>(parts[1]);
    const auto items = nb::cast<nb::list>(parts[0]);
    for (nb::handle item : items) {
      const nb::object weight = item[0], bias = item[1];
      result.parts.push_back(part(name, weight, bias_name, bias, nb::cast<std::string>(item[2]), columns));
      columns = result.parts.front().format.depth;
    }
    if (result.parts.empty()) refuse(name, "is empty");
    return result;
  }

  Activations rows(const char* name, const Out& array, int64_t tokens, int64_t columns) const {
    check_layout(name, array, 2);
    if (float_type(name, array) != layer_.dtype) refuse(name, "must have the dtype of the layer");
    if (tokens >= 0) check_dim(name, array, 0, tokens, "tokens");
    check_dim(name, array, 1, columns, "columns");
    return {array.data(), static_cast<int64_t>(array.shape(0)), array.stride(0)};
  }

  const void* angles(const char* name, const In& array, int64_t tokens) const {
    check_layout(name, array, 2);
    if (float_type(name, array) != layer_.dtype) refuse(name, "must have the dtype of the layer");
    check_dim(name, array, 0, tokens, "tokens");
    check_dim(name, array, 1, layer_.head_dim, "head size");
    return array.data();
  }

  Layer layer_ = {};
  std::vector<In> arrays_;
  std::vector<BoundLinear> matrices_;
};

// Everything is checked before anything is computed. `turns`: of each layer, its place in `angles`.
void decode_layers(const std::vector<const BoundLayer*>& layers, const std::vector<const BoundCache*>& caches,
                   const std::vector<const BoundExperts*>& experts, const Out& hidden,
                   const std::vector<std::pair<In, In>>& angles, const std::vector<size_t>& turns,
                   const In& block_tables, const In& seq_lens, const Out& rows, int64_t threads) {
  struct Step {
    Activations hidden, rows;
    Rotation turns;
    GqaArgs cache;
  };
  std::vector<Step> steps;
  for (size_t i = 0; i < layers.size(); ++i) {
    const Activations x = layers[i]->hidden(hidden);
    const auto& [cos, sin] = angles.at(turns[i]);
    steps.push_back({x, layers[i]->expert_rows(rows, x.tokens), layers[i]->rotation(cos, sin, x.tokens),
                     caches[i]->of_sequences(block_tables, seq_lens, x.tokens)});
    layers[i]->check_cache(steps[i].cache);
    layers[i]->check_experts(experts[i]->args);
  }
  const int count = checked_threads(threads);
  nb::gil_scoped_release release;
  for (size_t i = 0; i < layers.size(); ++i)
    layers[i]->decode(steps[i].hidden, steps[i].turns, steps[i].cache, experts[i]->args, steps[i].rows, count);
}

}  // namespace

void add_layer(nb::module_& module) {
  nb::class_<BoundLayer>(module, "DecoderLayer")
      .def(nb::init<int, const In&, const nb::tuple&, const MaybeArray&, const MaybeArray&, const nb::tuple&,
                    const MaybeArray&, const In&, nb::handle, const MaybeArray&, bool, double, int64_t, int64_t, bool,
                    bool>(),
           "dtype"_a, "input_norm"_a, "qkv"_a, "q_norm"_a.none(), "k_norm"_a.none(), "o"_a, "attention_norm"_a.none(),
           "post_norm"_a, "router"_a.none(), "block_norm"_a.none(), "wide_block"_a, "eps"_a, "head_dim"_a, "top_k"_a,
           "normalize"_a, "round"_a)
      .def("before_attention", &BoundLayer::before, "hidden"_a, "cos"_a, "sin"_a, "qkv"_a, "threads"_a)
      .def("after_attention", &BoundLayer::after, "hidden"_a, "attention"_a, "experts"_a, "rows"_a, "threads"_a);
  module.def("decode_layers", decode_layers, "layers"_a, "caches"_a, "experts"_a, "hidden"_a, "angles"_a, "turns"_a,
             "block_tables"_a, "seq_lens"_a, "rows"_a, "threads"_a);
}

}  // namespace moelight::bind
