// Linear layers and experts: arrays come in by DLPack, are checked here, and leave as plain structs. Does not depend on
// any torch and no algorithm.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include <memory>
#include <utility>
#include <vector>

#include "checks.h"
#include "ffn.h"
#include "ffn/streams.h"
#include "quantized.h"
#include "quantized/integers.h"

namespace moelight::bind {
namespace {

using namespace nb::literals;

int64_t size_of(const In& array, size_t dim) { return static_cast<int64_t>(array.shape(dim)); }

WeightType weight_type(const char* name, const In& array) {
  const nb::dlpack::dtype type = array.dtype();
  const auto code = static_cast<nb::dlpack::dtype_code>(type.code);
  if (type.lanes == 1 && code == nb::dlpack::dtype_code::Float && type.bits == 32) return WeightType::kFloat32;
  if (type.lanes == 1 && code == nb::dlpack::dtype_code::Float && type.bits == 16) return WeightType::kFloat16;
  if (type.lanes == 1 && code == nb::dlpack::dtype_code::Bfloat && type.bits == 16) return WeightType::kBFloat16;
  refuse(name, "must be float32, bfloat16 or float16");
}

// Of a number as it is stored.
int64_t float_bytes(WeightType type) { return type == WeightType::kFloat32 ? 4 : 2; }

Format make_format(const char* name, WeightType type, int64_t rows, int64_t depth) {
  if (rows < 1 || depth < 1) refuse(name, "is empty");
  return {type, rows, depth, DType::kFloat32};
}

// Whether a matrix is stored as [inputs, outputs].
bool is_transposed(const In& array) {
  return array.ndim() == 2 && array.shape(1) > 1 && array.stride(1) != 1 && array.stride(0) == 1;
}

Weight check_weight(const char* name, const In& array, const Format& format) {
  if (format.transposed) {
    if (array.device_type() != nb::device::cpu::value) refuse(name, "must be in CPU memory");
    if (!is_transposed(array)) refuse(name, "its tensors must all be transposed, or none");
    if (array.stride(1) < static_cast<int64_t>(array.shape(0))) refuse(name, "its columns overlap");
  } else {
    check_layout(name, array, 2);
  }
  if (weight_type(name, array) != format.type) refuse(name, "its tensors must have one dtype");
  check_dim(name, array, 0, format.rows, "rows");
  check_dim(name, array, 1, format.depth, "columns");
  return {array.data(), array.stride(format.transposed ? 1 : 0) * float_bytes(format.type), nullptr};
}

// An entry of a list: an array, or a quantised matrix.
struct Entry {
  In array;
  std::unique_ptr<Quantized> quantized;

  int64_t rows() const { return quantized != nullptr ? quantized->rows : size_of(array, 0); }
};

WeightType entry_type(const char* name, const Entry& entry) {
  return entry.quantized != nullptr ? WeightType::kQuantized : weight_type(name, entry.array);
}

void check_matrix(const char* name, const Entry& entry) {
  if (entry.quantized == nullptr && entry.array.ndim() != 2) check_layout(name, entry.array, 2);
}

Weight check_entry(const char* name, const Entry& entry, const Format& format) {
  if (format.type != WeightType::kQuantized && entry.quantized == nullptr)
    return check_weight(name, entry.array, format);
  if (format.type != WeightType::kQuantized || entry.quantized == nullptr)
    refuse(name, "its tensors must all be quantised matrices, or none");
  const Quantized& q = *entry.quantized;
  if (q.rows != format.rows || q.columns != format.depth)
    refuse(name, "must have " + std::to_string(format.rows) + " rows and " + std::to_string(format.depth) +
                     " columns, has " + std::to_string(q.rows) + " and " + std::to_string(q.columns));
  if (format.integers)
    if (const char* const reason = no_whole_numbers(q)) refuse(name, reason);
  return {q.transposed() ? nullptr : q.codes, q.row_bytes, nullptr, &q, 0};
}

// What multiplies: numbers as they are ("auto"), or codes and tokens rounded to int8.
bool rounds_tokens(const char* name, const std::string& activations, WeightType type) {
  if (activations == "auto") return false;
  if (activations != "int8") refuse("activations", "must be auto or int8, is '" + activations + "'");
  if (type != WeightType::kQuantized) refuse(name, "int8 activations need quantised matrices");
  return true;
}

// Biases share one type.
const void* check_bias(const char* name, const In& array, Format& format, bool& seen) {
  check_layout(name, array, 1);
  const DType type = float_type(name, array);
  if (seen && type != format.bias_type) refuse(name, "its tensors must have one dtype");
  check_dim(name, array, 0, format.rows, "rows");
  if (array.shape(0) > 1 && array.stride(0) != 1) refuse(name, "must be contiguous");
  format.bias_type = type;
  seen = true;
  return array.data();
}

Tokens check_tokens(const In& x, const Out& out, int64_t columns) {
  check_layout("x", x, 2);
  const DType type = float_type("x", x);
  check_layout("out", out, 2);
  if (float_type("out", out) != type) refuse("out", "must have the dtype of x");
  check_dim("out", out, 0, size_of(x, 0), "tokens");
  check_dim("out", out, 1, columns, "columns");
  return {type, size_of(x, 0), x.data(), x.stride(0), out.data(), out.stride(0)};
}

In to_array(const char* name, nb::handle item) {
  In array;
  if (!nb::try_cast<In>(item, array)) refuse(name, "must be an array in CPU memory");
  return array;
}

Entry to_entry(const char* name, nb::handle item, std::vector<In>& arrays) {
  if (is_quantized(item)) return {{}, std::make_unique<Quantized>(to_quantized(name, item, arrays))};
  return {to_array(name, item), nullptr};
}

void linear(const In& x, nb::object weight, nb::object bias, const std::string& activations, const Out& out,
            int64_t threads) {
  check_layout("x", x, 2);
  const BoundLinear bound = bind_linear("weight", weight, "bias", bias, activations, size_of(x, 1));
  LinearArgs args = bound.args;
  args.tokens = check_tokens(x, out, args.format.rows);
  args.threads = checked_threads(threads);
  nb::gil_scoped_release release;
  moelight::linear(args);
}

// The lists that make up one weight of every expert; names are those of the face.
struct Lists {
  const char *name, *bias_name;
  nb::object weights, bias;
};

class Experts {
 public:
  Experts(const In& offsets, int64_t tokens) {
    check_layout("offsets", offsets, 1);
    check_int_type<int32_t>("offsets", offsets);
    count_ = size_of(offsets, 0) - 1;
    if (count_ < 0) refuse("offsets", "must have one entry more than there are experts, is empty");
    if (count_ > 0 && offsets.stride(0) != 1) refuse("offsets", "must be contiguous");
    at_ = static_cast<const int32_t*>(offsets.data());
    if (at_[0] != 0) refuse("offsets", "must begin with 0");
    for (int64_t e = 0; e < count_; ++e)
      if (at_[e + 1] < at_[e]) refuse("offsets", "falls after entry " + std::to_string(e));
    if (at_[count_] != tokens)
      refuse("offsets", "ends with " + std::to_string(at_[count_]) + ", x has " + std::to_string(tokens) + " rows");
  }

  // Every expert of a list that is not None, as if it had one row.
  explicit Experts(const nb::list& weights) : row_offsets_(nb::len(weights) + 1), at_(row_offsets_.data()) {
    count_ = static_cast<int64_t>(row_offsets_.size()) - 1;
    for (size_t e = 0; e + 1 < row_offsets_.size(); ++e)
      row_offsets_[e + 1] = row_offsets_[e] + (weights[e].is_none() ? 0 : 1);
  }
  Experts(Experts&&) = default;

  // The first expert that has tokens, or -1.
  int64_t first_busy() const {
    for (int64_t e = 0; e < count_; ++e)
      if (busy(e)) return e;
    return -1;
  }

  // The weights of a list; those of experts without tokens stay empty.
  std::vector<Entry> entries(const char* name, const nb::object& list) {
    std::vector<Entry> result(static_cast<size_t>(count_));
    for (int64_t e = 0; e < count_ && !list.is_none(); ++e)
      if (busy(e)) result[static_cast<size_t>(e)] = to_entry(name, item(name, list, e), arrays_);
    return result;
  }

  // The tensors of a list; those of experts without tokens stay empty.
  std::vector<In> arrays(const char* name, const nb::object& list) const {
    std::vector<In> result(static_cast<size_t>(count_));
    for (int64_t e = 0; e < count_ && !list.is_none(); ++e)
      if (busy(e)) result[static_cast<size_t>(e)] = to_array(name, item(name, list, e));
    return result;
  }

  std::vector<Weight> check(const Lists& lists, const std::vector<Entry>& entries, Format& format) {
    std::vector<Weight> weights(static_cast<size_t>(count_), Weight{nullptr, 0, nullptr});
    const std::vector<In> biases = this->arrays(lists.bias_name, lists.bias);
    bool seen = false;
    const Quantized* like = nullptr;
    for (int64_t e = 0; e < count_; ++e) {
      if (!busy(e)) continue;
      const auto i = static_cast<size_t>(e);
      weights[i] = check_entry(lists.name, entries[i], format);
      if (like != nullptr && !alike(*like, *weights[i].quantized))
        refuse(lists.name, "its matrices must have one format");
      like = weights[i].quantized;
      if (!lists.bias.is_none()) weights[i].bias = check_bias(lists.bias_name, biases[i], format, seen);
    }
    arrays_.insert(arrays_.end(), biases.begin(), biases.end());
    return weights;
  }

  void check_lengths(const Lists& lists) const {
    length(lists.name, lists.weights);
    if (!lists.bias.is_none()) length(lists.bias_name, lists.bias);
  }

  int64_t count() const { return count_; }
  const int32_t* offsets() const { return at_; }

 private:
  bool busy(int64_t e) const { return at_[e + 1] > at_[e]; }

  void length(const char* name, const nb::object& list) const {
    if (!nb::isinstance<nb::list>(list)) refuse(name, "must be a list with one tensor per expert");
    const auto count = static_cast<int64_t>(nb::len(list));
    if (count != count_)
      refuse(name, "has " + std::to_string(count) + " entries, offsets is for " + std::to_string(count_) + " experts");
  }

  nb::object item(const char* name, const nb::object& list, int64_t e) const {
    nb::object entry = list[static_cast<size_t>(e)];
    if (entry.is_none())
      refuse(name, "expert " + std::to_string(e) + " has " + std::to_string(at_[e + 1] - at_[e]) + " tokens and None");
    return entry;
  }

  int64_t count_;
  std::vector<int32_t> row_offsets_;  // of weights that are given before their rows
  const int32_t* at_;                 // a moved vector keeps its memory
  std::vector<In> arrays_;            // biases and parts, for as long as the product runs
};

Activation activation_named(const std::string& curve, double alpha, double limit, double shift, bool late) {
  Activation activation = {
      .alpha = static_cast<float>(alpha),
      .limit = static_cast<float>(limit),
      .shift = static_cast<float>(shift),
      .late = late,
  };
  const char* const names[] = {"silu", "gelu", "gelu_tanh", "relu2"};
  for (int i = 0; i < 4; ++i) {
    if (curve != names[i]) continue;
    activation.curve = static_cast<Curve>(i);
    return activation;
  }
  refuse("activation", "must be silu, gelu, gelu_tanh or relu2, is '" + curve + "'");
}

// A list's format by its first tensor with tokens.
Format format_of(const char* name, const Entry& first, int64_t rows, int64_t depth) {
  check_matrix(name, first);
  Format format = make_format(name, entry_type(name, first), rows, depth);
  format.transposed = first.quantized == nullptr && is_transposed(first.array);
  return format;
}

bool stored_alike(const Entry& one, const Format& of_one, const Entry& two, const Format& of_two) {
  if (of_one.type != of_two.type || of_one.transposed != of_two.transposed) return false;
  return one.quantized == nullptr || alike(*one.quantized, *two.quantized);
}

// The parts of one weight of 2 half_rows rows, of which the second begins `half_rows` rows after the first.
std::vector<Weight> second_half(const std::vector<Weight>& weights, const Format& format, int64_t half_rows) {
  std::vector<Weight> second = weights;
  for (Weight& weight : second) {
    if (!weight.present()) continue;
    const int64_t step = format.transposed ? float_bytes(format.type) : weight.row_bytes;
    weight.first_row += half_rows;
    if (weight.data != nullptr) weight.data = static_cast<const char*>(weight.data) + half_rows * step;
    if (weight.bias != nullptr)
      weight.bias = static_cast<const char*>(weight.bias) + half_rows * dtype_bytes(format.bias_type);
  }
  return second;
}

class CheckedExperts : public BoundExperts {
 public:
  // Only experts with rows are looked at. `up` None: gate_up has both, interleaved if `interleaved`, or `ungated` up
  // alone.
  CheckedExperts(Experts experts, int64_t hidden, const nb::object& gate_up, const nb::object& up,
                 const nb::object& down, const nb::tuple& activation, const std::string& pairing,
                 const nb::object& gate_up_bias, const nb::object& up_bias, const nb::object& down_bias,
                 const std::pair<std::string, std::string>& activations)
      : experts_(std::move(experts)) {
    const Lists first_lists = {"gate_up", "gate_up_bias", gate_up, gate_up_bias};
    const Lists up_lists = {"up", "up_bias", up, up_bias};
    const Lists down_lists = {"down", "down_bias", down, down_bias};
    const bool apart = !up.is_none(), joined = !apart && pairing == "joined";
    experts_.check_lengths(first_lists);
    if (apart) experts_.check_lengths(up_lists);
    experts_.check_lengths(down_lists);
    args.activation = activation_named(nb::cast<std::string>(activation[0]), nb::cast<double>(activation[1]),
                                       nb::cast<double>(activation[2]), nb::cast<double>(activation[3]),
                                       nb::cast<bool>(activation[4]));
    args.pairing = apart || joined            ? Pairing::kApart
                   : pairing == "interleaved" ? Pairing::kInterleaved
                                              : Pairing::kUngated;
    args.offsets = experts_.offsets();
    args.experts = experts_.count();
    const int64_t busy = experts_.first_busy();
    if (busy < 0) return;

    const auto at = static_cast<size_t>(busy);
    first_entries_ = experts_.entries("gate_up", gate_up), down_entries_ = experts_.entries("down", down);
    const Entry &first = first_entries_[at], &first_down = down_entries_[at];
    check_matrix("gate_up", first);
    const bool both_halves = joined || args.pairing == Pairing::kInterleaved;
    const int64_t rows = first.rows();
    if (both_halves && rows % 2 != 0)
      refuse("gate_up", "must have an even number of rows, has " + std::to_string(rows));
    const int64_t inner = both_halves ? rows / 2 : rows;
    args.up_format = format_of("gate_up", first, rows, hidden);
    args.down_format = format_of("down", first_down, hidden, inner);
    args.up_format.integers = rounds_tokens("gate_up", activations.first, args.up_format.type);
    args.down_format.integers = rounds_tokens("down", activations.second, args.down_format.type);
    firsts_ = experts_.check(first_lists, first_entries_, args.up_format);
    downs_ = experts_.check(down_lists, down_entries_, args.down_format);
    up_entries_ = experts_.entries("up", up);
    if (joined) {
      args.up_format.rows = inner;
      ups_ = second_half(firsts_, args.up_format, inner);
    } else if (apart) {
      const Format gate = args.up_format;
      args.up_format = format_of("up", up_entries_[at], inner, hidden);
      args.up_format.integers = rounds_tokens("up", activations.first, args.up_format.type);
      ups_ = experts_.check(up_lists, up_entries_, args.up_format);
      if (gate_up_bias.is_none() != up_bias.is_none() || args.up_format.bias_type != gate.bias_type)
        refuse("up_bias", "must be given as gate_up_bias is, with its dtype");
      if (!stored_alike(first, gate, up_entries_[at], args.up_format)) args.gate_format = gate;
    }
    args.gate = args.pairing == Pairing::kApart ? firsts_.data() : nullptr;
    args.up = args.pairing == Pairing::kApart ? ups_.data() : firsts_.data();
    args.down = downs_.data();
  }

 private:
  Experts experts_;
  std::vector<Entry> first_entries_, up_entries_, down_entries_;
  std::vector<Weight> firsts_, ups_, downs_;
};

std::unique_ptr<BoundExperts> bind_experts(int64_t hidden, nb::object gate_up, nb::object up, nb::object down,
                                           nb::tuple activation, const std::string& pairing, nb::object gate_up_bias,
                                           nb::object up_bias, nb::object down_bias,
                                           const std::pair<std::string, std::string>& activations) {
  if (!nb::isinstance<nb::list>(gate_up)) refuse("gate_up", "must be a list with one tensor per expert");
  return std::make_unique<CheckedExperts>(Experts(nb::borrow<nb::list>(gate_up)), hidden, gate_up, up, down, activation,
                                          pairing, gate_up_bias, up_bias, down_bias, activations);
}

void expert_ffn(const In& x, nb::object gate_up, nb::object up, nb::object down, const In& offsets,
                nb::tuple activation, const std::string& pairing, nb::object gate_up_bias, nb::object up_bias,
                nb::object down_bias, const std::pair<std::string, std::string>& activations, const Out& out,
                int64_t threads) {
  check_layout("x", x, 2);
  const int64_t hidden = size_of(x, 1);
  const Tokens tokens = check_tokens(x, out, hidden);
  const CheckedExperts experts(Experts(offsets, tokens.count), hidden, gate_up, up, down, activation, pairing,
                               gate_up_bias, up_bias, down_bias, activations);
  ExpertArgs args = experts.args;
  args.threads = checked_threads(threads);
  args.tokens = tokens;
  if (args.down == nullptr) return;
  nb::gil_scoped_release release;
  moelight::expert_ffn(args);
}

// Types by their places in the enumerations; sizes are the caller's to check.
int64_t linear_workspace(int x, int weight, bool integers, int64_t tokens, int64_t outputs, int64_t inputs,
                         int64_t threads) {
  Format format = make_format("weight", static_cast<WeightType>(weight), outputs, inputs);
  format.integers = integers;
  return moelight::linear_workspace(static_cast<DType>(x), format, tokens, checked_threads(threads));
}

int64_t expert_ffn_workspace(int x, int weight, bool integers, bool transposed, bool twice, int64_t tokens,
                             int64_t hidden, int64_t intermediate, int64_t experts, int64_t threads) {
  const auto type = static_cast<WeightType>(weight);
  Format up = make_format("gate_up", type, 2 * intermediate, hidden);
  Format down = make_format("down", type, hidden, intermediate);
  up.transposed = down.transposed = transposed;
  up.integers = down.integers = integers;
  return moelight::expert_ffn_workspace(static_cast<DType>(x), up, down, twice, tokens, experts,
                                        checked_threads(threads));
}

nb::list stream_forms() {
  nb::list names;
  for (const StreamForm& form : kStreamForms) names.append(form.name);
  return names;
}

// The place of a number of tokens among those that have a form.
int stream_size(int64_t tokens) {
  for (int size = 0; size < kStreamSizes; ++size)
    if (tokens == kStreamTokenCounts[size]) return size;
  refuse("tokens", "must be 1, 2 or 4, is " + std::to_string(tokens));
}

void set_stream(int64_t tokens, const std::string& name) {
  const int size = stream_size(tokens);
  for (int form = 0; form < kStreamFormCount; ++form)
    if (name == kStreamForms[form].name) return set_stream_form(size, form);
  refuse("form", "is none of `stream_forms`: '" + name + "'");
}

}  // namespace

BoundLinear bind_linear(const char* name, nb::handle weight, const char* bias_name, nb::handle bias,
                        const std::string& activations, int64_t columns) {
  BoundLinear bound;
  Entry entry = to_entry(name, weight, bound.arrays);
  if (entry.quantized == nullptr) check_layout(name, entry.array, 2);
  if (columns < 0) columns = entry.quantized != nullptr ? entry.quantized->columns : size_of(entry.array, 1);
  LinearArgs& args = bound.args;
  args.format = make_format(name, entry_type(name, entry), entry.rows(), columns);
  args.format.integers = rounds_tokens(name, activations, args.format.type);
  args.weight = check_entry(name, entry, args.format);
  if (entry.quantized == nullptr) bound.arrays.push_back(entry.array);
  bound.quantized = std::move(entry.quantized);
  if (bias.is_none()) return bound;
  bool seen = false;
  bound.arrays.push_back(to_array(bias_name, bias));
  args.weight.bias = check_bias(bias_name, bound.arrays.back(), args.format, seen);
  return bound;
}

void add_ffn(nb::module_& module) {
  module.def("stream_forms", stream_forms);
  module.def("stream", [](int64_t tokens) { return kStreamForms[stream_form(stream_size(tokens))].name; }, "tokens"_a);
  module.def("set_stream", set_stream, "tokens"_a, "form"_a);
  nb::class_<BoundExperts>(module, "BoundExperts");
  module.def("bind_experts", bind_experts, "hidden"_a, "gate_up"_a, "up"_a.none(), "down"_a, "activation"_a,
             "pairing"_a, "gate_up_bias"_a.none(), "up_bias"_a.none(), "down_bias"_a.none(), "activations"_a);
  module.def("linear_workspace", linear_workspace, "x"_a, "weight"_a, "integers"_a, "tokens"_a, "outputs"_a, "inputs"_a,
             "threads"_a);
  module.def("expert_ffn_workspace", expert_ffn_workspace, "x"_a, "weight"_a, "integers"_a, "transposed"_a, "twice"_a,
             "tokens"_a, "hidden"_a, "intermediate"_a, "experts"_a, "threads"_a);
  module.def("ffn_workspace_kept", moelight::ffn_workspace_kept);
  module.def("linear", linear, "x"_a, "weight"_a, "bias"_a.none(), "activations"_a, "out"_a, "threads"_a);
  module.def("expert_ffn", expert_ffn, "x"_a, "gate_up"_a, "up"_a.none(), "down"_a, "offsets"_a, "activation"_a,
             "pairing"_a, "gate_up_bias"_a.none(), "up_bias"_a.none(), "down_bias"_a.none(), "activations"_a, "out"_a,
             "threads"_a);
}

}  // namespace moelight::bind
