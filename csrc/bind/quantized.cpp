// Quantised matrices: their parts come in by DLPack and are measured here. Does not depend on any torch and no
// algorithm.

#include "quantized.h"

#include <nanobind/stl/string.h>

#include <string>

namespace moelight::bind {
namespace {

using namespace nb::literals;

constexpr const char* kPackingNames[] = {"fp8",  "int8", "packed", "gptq",   "awq",  "mxfp4", "Q4_0",
                                         "Q4_1", "Q5_0", "Q5_1",   "Q8_0",   "Q2_K", "Q3_K",  "Q4_K",
                                         "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"};
static_assert(std::size(kPackingNames) == kPackings);
constexpr int64_t kMostSize = int64_t{1} << 31;

int64_t up_to(int64_t n, int64_t step) { return (n + step - 1) / step; }

// A part of a matrix: its bytes, contiguous.
class Part {
 public:
  Part(const char* name, const char* what, nb::handle item, std::vector<In>& kept) : name_(name), what_(what) {
    if (item.is_none()) return;
    In array;
    if (!nb::try_cast<In>(item, array) || array.device_type() != nb::device::cpu::value)
      refuse(name, std::string("its ") + what + " must be an array in CPU memory");
    int64_t expected = 1;
    for (size_t i = array.ndim(); i-- > 0; expected *= static_cast<int64_t>(array.shape(i)))
      if (array.shape(i) > 1 && array.stride(i) != expected)
        refuse(name, std::string("its ") + what + " must be contiguous");
    type_ = array.dtype();
    count_ = expected, item_bytes_ = type_.bits / 8;
    data_ = array.data();
    kept.push_back(array);
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
  void demand(int64_t found, int64_t expected, const char* unit) const {
    if (data_ == nullptr) refuse(name_, std::string("its ") + what_ + " are missing");
    if (found != expected)
      refuse(name_, std::string("its ") + what_ + " have " + std::to_string(found) + " " + unit + ", must have " +
                        std::to_string(expected));
  }

  const char *name_, *what_;
  nb::dlpack::dtype type_ = {};
  int64_t count_ = 0, item_bytes_ = 0;
  const void* data_ = nullptr;
};

Packing packing_named(const char* name, const std::string& kind) {
  for (int i = 0; i < kPackings; ++i)
    if (kind == kPackingNames[i]) return static_cast<Packing>(i);
  refuse(name, "numbers of the kind '" + kind + "' are not read");
}

// That blocks, groups and words come out even where the format has no other rule.
void check_steps(const char* name, const Quantized& q) {
  const int64_t per = 32 / q.bits;
  int64_t rows = 1, columns = 1;
  if (in_blocks(q.packing)) columns = block_size(q.packing).numbers;
  if (q.packing == Packing::kMx) columns = 32;
  if (q.packing == Packing::kGptq) rows = columns = per;
  if (q.packing == Packing::kAwq) rows = per;
  if (q.rows % rows != 0) refuse(name, "needs a multiple of " + std::to_string(rows) + " rows");
  if (q.columns % columns != 0) refuse(name, "needs a multiple of " + std::to_string(columns) + " columns");
}

int64_t row_bytes(const Quantized& q) {
  switch (q.packing) {
    case Packing::kFp8:
    case Packing::kInt8:
      return q.columns;
    case Packing::kPacked:
      return 4 * up_to(q.columns * q.bits, 32);
    case Packing::kGptq:
    case Packing::kAwq:
      return q.columns * q.bits / 8;
    case Packing::kMx:
      return q.columns / 2;
    default:
      return q.columns / block_size(q.packing).numbers * block_size(q.packing).bytes;
  }
}

// Checks the parts by the sizes, which are in place.
void read_parts(const char* name, const nb::tuple& from, Quantized& q, std::vector<In>& kept) {
  const Part codes(name, "codes", from[7], kept), scales(name, "scales", from[8], kept);
  const Part zeros(name, "zero points", from[9], kept), order(name, "groups of columns", from[10], kept);
  const int64_t per = 32 / q.bits;
  q.row_bytes = row_bytes(q);
  q.codes = codes.bytes(q.packing == Packing::kAwq ? q.columns * q.rows / 2 : q.rows * q.row_bytes);
  q.scales = nullptr, q.zeros = nullptr, q.order = nullptr;
  if (in_blocks(q.packing)) return;
  const bool scaled = q.packing == Packing::kFp8 || q.packing == Packing::kInt8;
  const int64_t row_groups = !scaled ? q.rows : q.group_rows == 0 ? 1 : up_to(q.rows, q.group_rows);
  q.scales = scales.scales(row_groups * q.groups, q.scale_type);
  if (q.packing == Packing::kMx && q.scale_type != ScaleType::kPower) refuse(name, "its scales must be powers of two");
  if (q.packing == Packing::kMx) return;
  if (q.transposed()) {
    q.zeros = zeros.bytes(4 * q.groups * (q.rows / per));
  } else if (zeros.data() != nullptr && q.packing != Packing::kFp8) {
    q.zeros = zeros.bytes(scaled ? row_groups * q.groups : 4 * up_to(q.rows, per) * q.groups);
  }
  if (q.packing == Packing::kGptq && order.data() != nullptr)
    q.order = reinterpret_cast<const int32_t*>(order.bytes(4 * q.columns));
}

void dequantize(nb::tuple matrix, const Out& out, int64_t threads) {
  std::vector<In> kept;
  const Quantized from = to_quantized("matrix", matrix, kept);
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

Quantized to_quantized(const char* name, nb::handle item, std::vector<In>& kept) {
  const auto from = nb::cast<nb::tuple>(item);
  if (nb::len(from) != 11) refuse(name, "must be a quantised matrix");
  Quantized q = {};
  q.packing = packing_named(name, nb::cast<std::string>(from[0]));
  q.bits = nb::cast<int>(from[1]), q.zero_bias = nb::cast<int>(from[6]);
  q.rows = nb::cast<int64_t>(from[2]), q.columns = nb::cast<int64_t>(from[3]);
  q.group_rows = nb::cast<int64_t>(from[5]);
  if (q.rows < 1 || q.columns < 1) refuse(name, "is empty");
  if (q.rows > kMostSize || q.columns > kMostSize || q.group_rows < 0) refuse(name, "has a size that is not read");
  const bool words = q.packing == Packing::kPacked || q.packing == Packing::kGptq;
  if (q.packing == Packing::kAwq && q.bits != 4) refuse(name, "AWQ is read with 4 bits");
  if (!words && q.packing != Packing::kAwq) q.bits = 8;
  if (q.bits != 2 && q.bits != 4 && q.bits != 8) refuse(name, "codes of 2, 4 and 8 bits are read");
  const auto group = nb::cast<int64_t>(from[4]);
  q.group = q.packing == Packing::kMx ? 32 : group < 1 ? q.columns : std::min(group, q.columns);
  q.groups = up_to(q.columns, q.group);
  check_steps(name, q);
  read_parts(name, from, q, kept);
  return q;
}

bool alike(const Quantized& a, const Quantized& b) {
  return a.packing == b.packing && a.bits == b.bits && a.rows == b.rows && a.columns == b.columns &&
         a.group == b.group && a.group_rows == b.group_rows && a.zero_bias == b.zero_bias &&
         (a.zeros == nullptr) == (b.zeros == nullptr) && (a.order == nullptr) == (b.order == nullptr);
}

void add_quantized(nb::module_& module) { module.def("dequantize", dequantize, "matrix"_a, "out"_a, "threads"_a); }

}  // namespace moelight::bind
