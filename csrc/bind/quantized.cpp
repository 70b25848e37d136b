// Quantised matrices: their parts come in by DLPack and are measured here. Does not depend on any torch and no
// algorithm.

#include "quantized.h"

#include <nanobind/stl/string.h>

#include <string>

#include "quantized/formats.h"

namespace moelight::bind {
namespace {

using namespace nb::literals;

constexpr auto kFormats = Formats::traits();
constexpr int64_t kMaxSize = int64_t{1} << 31;

int64_t up_to(int64_t n, int64_t step) { return (n + step - 1) / step; }

// A part of a matrix: its bytes, contiguous.
class Part {
 public:
  Part(const char* name, const char* label, nb::handle item, std::vector<In>& arrays) : name_(name), label_(label) {
    if (item.is_none()) return;
    In array;
    if (!nb::try_cast<In>(item, array) || array.device_type() != nb::device::cpu::value)
      refuse(name, std::string("its ") + label + " must be an array in CPU memory");
    int64_t expected = 1;
    for (size_t i = array.ndim(); i-- > 0; expected *= static_cast<int64_t>(array.shape(i)))
      if (array.shape(i) > 1 && array.stride(i) != expected)
        refuse(name, std::string("its ") + label + " must be contiguous");
    type_ = array.dtype();
    count_ = expected, item_bytes_ = type_.bits / 8;
    data_ = array.data();
    arrays.push_back(array);
  }

  const void* data() const { return data_; }

  const uint8_t* bytes(int64_t expected) const {
    demand(count_ * item_bytes_, expected, "bytes");
    return static_cast<const uint8_t*>(data_);
  }

  const void* scales(int64_t expected, ScaleType& type) const {
    demand(count_, expected, "numbers");
    const auto code = static_cast<nb::dlpack::dtype_code>(type_.code);
    const bool single = code == nb::dlpack::dtype_code::Float && type_.bits == 32;
    const bool half = code == nb::dlpack::dtype_code::Float && type_.bits == 16;
    const bool brain = code == nb::dlpack::dtype_code::Bfloat && type_.bits == 16;
    if (!single && !half && !brain && type_.bits != 8)
      refuse(name_, "its scales must be float32, bfloat16, float16 or powers of two");
    type = single ? ScaleType::kFloat32 : half ? ScaleType::kFloat16 : brain ? ScaleType::kBFloat16 : ScaleType::kPower;
    return data_;
  }

 private:
  void demand(int64_t count, int64_t expected, const char* unit) const {
    if (data_ == nullptr) refuse(name_, std::string("its ") + label_ + " are missing");
    if (count != expected)
      refuse(name_, std::string("its ") + label_ + " have " + std::to_string(count) + " " + unit + ", must have " +
                        std::to_string(expected));
  }

  const char *name_, *label_;
  nb::dlpack::dtype type_ = {};
  int64_t count_ = 0, item_bytes_ = 0;
  const void* data_ = nullptr;
};

// The format of a name; where several share it, that of codes of so many bits.
const FormatTraits& format_named(const char* name, const std::string& kind, int bits) {
  int64_t named = 0;
  for (const FormatTraits& format : kFormats) named += kind == format.name;
  if (named == 0) refuse(name, "numbers of the kind '" + kind + "' are not read");
  for (const FormatTraits& format : kFormats)
    if (kind == format.name && (named == 1 || bits == format.bits)) return format;
  refuse(name, kind + " is not read with codes of " + std::to_string(bits) + " bits");
}

// Bytes of the codes of a row; of transposed codes its share.
int64_t row_bytes(const FormatTraits& format, int64_t columns) {
  if (format.scales == Scales::kByColumns) return columns * format.block_bytes / format.block;
  return up_to(columns, format.block) * format.block_bytes;
}

// Checks the parts by the sizes, which are in place.
void read_parts(const char* name, const nb::tuple& from, Quantized& q, std::vector<In>& arrays) {
  const Part codes(name, "codes", from[7], arrays), scales(name, "scales", from[8], arrays);
  const Part zeros(name, "zero points", from[9], arrays), order(name, "groups of columns", from[10], arrays);
  const FormatTraits& format = *q.format;
  const int64_t per = 32 / format.bits;
  q.row_bytes = row_bytes(format, q.columns);
  q.codes = codes.bytes(q.transposed() ? q.columns * q.rows / format.block * format.block_bytes : q.rows * q.row_bytes);
  q.scales = nullptr, q.zeros = nullptr, q.order = nullptr;
  if (format.scales == Scales::kInBlocks) return;
  const int64_t tiles = q.group_rows == 0 ? 1 : up_to(q.rows, q.group_rows);
  const int64_t scale_rows = format.scales == Scales::kByTiles ? tiles : q.rows;
  q.scales = scales.scales(scale_rows * q.groups, q.scale_type);
  if (format.powers && q.scale_type != ScaleType::kPower) refuse(name, "its scales must be powers of two");
  if (format.narrow && q.scale_type != ScaleType::kPower) refuse(name, "its scales must be E4M3");
  if (q.transposed()) {
    q.zeros = zeros.bytes(4 * q.groups * (q.rows / per));
  } else if (format.zeros == Zeros::kOne) {
    q.zeros = zeros.bytes(4);
  } else if (format.zeros == Zeros::kLikeScales) {
    ScaleType type = {};
    q.zeros = static_cast<const uint8_t*>(zeros.scales(scale_rows * q.groups, type));
    if (type != q.scale_type) refuse(name, "its minima must be of the type of its scales");
  } else if (zeros.data() != nullptr && format.zeros != Zeros::kNone) {
    q.zeros = zeros.bytes(format.zeros == Zeros::kBytes ? scale_rows * q.groups : 4 * up_to(q.rows, per) * q.groups);
  }
  if (format.ordered && order.data() != nullptr) q.order = reinterpret_cast<const int32_t*>(order.bytes(4 * q.columns));
}

void dequantize(nb::tuple matrix, const Out& out, int64_t threads) {
  std::vector<In> arrays;
  const Quantized from = to_quantized("matrix", matrix, arrays);
  check_layout("out", out, 2);
  const DType type = float_type("out", out);
  check_dim("out", out, 0, from.rows, "rows");
  check_dim("out", out, 1, from.columns, "columns");
  const int64_t stride = out.shape(0) > 1 ? out.stride(0) : from.columns;
  const int team = checked_threads(threads);
  nb::gil_scoped_release release;
  moelight::dequantize(from, type, out.data(), stride, team);
}

}  // namespace

Quantized to_quantized(const char* name, nb::handle item, std::vector<In>& arrays) {
  const auto from = nb::cast<nb::tuple>(item);
  if (nb::len(from) != 11) refuse(name, "must be a quantised matrix");
  Quantized q = {};
  q.format = &format_named(name, nb::cast<std::string>(from[0]), nb::cast<int>(from[1]));
  q.zero_bias = nb::cast<int>(from[6]);
  q.rows = nb::cast<int64_t>(from[2]), q.columns = nb::cast<int64_t>(from[3]);
  q.group_rows = nb::cast<int64_t>(from[5]);
  if (q.rows < 1 || q.columns < 1) refuse(name, "is empty");
  if (q.rows > kMaxSize || q.columns > kMaxSize || q.group_rows < 0) refuse(name, "has a size that is not read");
  const auto group = q.format->group != 0 ? q.format->group : nb::cast<int64_t>(from[4]);
  q.group = group < 1 ? q.columns : std::min(group, q.columns);
  q.groups = up_to(q.columns, q.group);
  const int64_t row_step = q.format->row_step, column_step = q.format->column_step;
  if (q.rows % row_step != 0) refuse(name, "needs a multiple of " + std::to_string(row_step) + " rows");
  if (q.columns % column_step != 0) refuse(name, "needs a multiple of " + std::to_string(column_step) + " columns");
  read_parts(name, from, q, arrays);
  return q;
}

bool alike(const Quantized& a, const Quantized& b) {
  return a.format == b.format && a.rows == b.rows && a.columns == b.columns && a.group == b.group &&
         a.group_rows == b.group_rows && a.zero_bias == b.zero_bias && (a.zeros == nullptr) == (b.zeros == nullptr) &&
         (a.order == nullptr) == (b.order == nullptr);
}

void add_quantized(nb::module_& module) { module.def("dequantize", dequantize, "matrix"_a, "out"_a, "threads"_a); }

}  // namespace moelight::bind
