// The router and the rows of its experts: arrays are checked here and leave as plain structs. Does not depend on any
// algorithm.

#include "route/route.h"

#include <limits>

#include "checks.h"

namespace moelight::bind {
namespace {

using namespace nb::literals;

constexpr int64_t kMaxRows = std::numeric_limits<int32_t>::max();

template <class T, class Array>
void check_dtype(const char* name, const Array& array, const char* meaning) {
  if (array.dtype() != nb::dtype<T>()) refuse(name, std::string("must be ") + meaning);
}

// Without a gap between rows, as the kernels write it.
template <class T>
T* packed(const char* name, const Out& array, std::initializer_list<int64_t> shape, const char* meaning) {
  check_layout(name, array, shape.size());
  check_dtype<T>(name, array, meaning);
  int64_t row = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    check_dim(name, array, i, shape.begin()[i], "size");
    if (i > 0) row *= shape.begin()[i];
  }
  if (array.shape(0) > 1 && row > 0 && array.stride(0) != row) refuse(name, "must be contiguous");
  return static_cast<T*>(array.data());
}

void route(const In& logits, int64_t top_k, bool normalize, bool round, const Out& weights, const Out& ids,
           int64_t threads) {
  check_layout("logits", logits, 2);
  const DType dtype = float_type("logits", logits);
  const auto tokens = static_cast<int64_t>(logits.shape(0)), experts = static_cast<int64_t>(logits.shape(1));
  if (experts > kMaxRows) refuse("logits", "has too many experts");
  if (top_k < 1 || top_k > experts)
    refuse("top_k", "must be from 1 to the " + std::to_string(experts) + " experts, is " + std::to_string(top_k));
  const RouteArgs args = {.dtype = dtype,
                          .tokens = tokens,
                          .experts = experts,
                          .top_k = top_k,
                          .logits = logits.data(),
                          .stride = logits.stride(0),
                          .normalize = normalize,
                          .round = round,
                          .weights = packed<float>("weights", weights, {tokens, top_k}, "float32"),
                          .ids = packed<int32_t>("ids", ids, {tokens, top_k}, "int32"),
                          .threads = checked_threads(threads)};
  nb::gil_scoped_release release;
  moelight::route(args);
}

void sort_by_expert(const In& ids, int64_t experts, const Out& order, const Out& token, const Out& position,
                    const Out& offsets) {
  check_layout("ids", ids, 2);
  check_int_type<int32_t>("ids", ids);
  if (experts < 0 || experts >= kMaxRows) refuse("experts", "must be from 0 on, is " + std::to_string(experts));
  const auto tokens = static_cast<int64_t>(ids.shape(0)), top_k = static_cast<int64_t>(ids.shape(1));
  if (top_k > 0 && tokens > kMaxRows / top_k) refuse("ids", "has too many rows: shape " + shape_of(ids));
  const auto* id = static_cast<const int32_t*>(ids.data());
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t r = 0; r < top_k; ++r)
      if (id[t * ids.stride(0) + r] < 0 || id[t * ids.stride(0) + r] >= experts)
        refuse("ids", "entry [" + std::to_string(t) + ", " + std::to_string(r) + "] is " +
                          std::to_string(id[t * ids.stride(0) + r]) + ", there are " + std::to_string(experts) +
                          " experts");
  const SortArgs args = {.tokens = tokens,
                         .experts = experts,
                         .top_k = top_k,
                         .ids = id,
                         .stride = ids.stride(0),
                         .order = packed<int32_t>("order", order, {tokens * top_k}, "int32"),
                         .token = packed<int32_t>("token", token, {tokens * top_k}, "int32"),
                         .position = packed<int32_t>("position", position, {tokens, top_k}, "int32"),
                         .offsets = packed<int32_t>("offsets", offsets, {experts + 1}, "int32")};
  nb::gil_scoped_release release;
  moelight::sort_by_expert(args);
}

void check_indices(const char* name, const In& array, int64_t columns, int64_t least, int64_t rows) {
  const auto* index = static_cast<const int32_t*>(array.data());
  for (int64_t i = 0; i < static_cast<int64_t>(array.shape(0)); ++i)
    for (int64_t j = 0; j < columns; ++j)
      if (const int32_t entry = index[i * array.stride(0) + j]; entry < least || entry >= rows)
        refuse(name, "row " + std::to_string(i) + " names row " + std::to_string(entry) + ", there are " +
                         std::to_string(rows));
}

template <class Array>
void check_apart(const Out& out, const char* name, const Array& array, int64_t out_bytes, int64_t bytes) {
  const auto a = reinterpret_cast<uintptr_t>(out.data()), b = reinterpret_cast<uintptr_t>(array.data());
  if (out_bytes > 0 && bytes > 0 && a < b + static_cast<uintptr_t>(bytes) && b < a + static_cast<uintptr_t>(out_bytes))
    refuse("out", std::string("shares memory with ") + name);
}

template <class Array>
int64_t extent_bytes(const Array& array, DType dtype) {
  if (array.shape(0) == 0 || array.shape(1) == 0) return 0;
  return (static_cast<int64_t>(array.shape(0) - 1) * array.stride(0) + static_cast<int64_t>(array.shape(1))) *
         dtype_bytes(dtype);
}

void gather_rows(const In& x, const In& token, const Out& out, int64_t threads) {
  check_layout("x", x, 2);
  const DType dtype = float_type("x", x);
  check_layout("token_of_row", token, 1);
  check_int_type<int32_t>("token_of_row", token);
  const auto rows = static_cast<int64_t>(token.shape(0)), hidden = static_cast<int64_t>(x.shape(1));
  if (rows > 1 && token.stride(0) != 1) refuse("token_of_row", "must be contiguous");
  check_indices("token_of_row", token, 1, 0, static_cast<int64_t>(x.shape(0)));
  check_layout("out", out, 2);
  if (float_type("out", out) != dtype) refuse("out", "must have the dtype of x");
  check_dim("out", out, 0, rows, "rows");
  check_dim("out", out, 1, hidden, "hidden size");
  check_apart(out, "x", x, extent_bytes(out, dtype), extent_bytes(x, dtype));
  const GatherArgs args = {.row_bytes = hidden * dtype_bytes(dtype),
                           .rows = rows,
                           .x = static_cast<const char*>(x.data()),
                           .x_stride = x.stride(0) * dtype_bytes(dtype),
                           .token = static_cast<const int32_t*>(token.data()),
                           .out = static_cast<char*>(out.data()),
                           .out_stride = out.stride(0) * dtype_bytes(dtype),
                           .threads = checked_threads(threads)};
  nb::gil_scoped_release release;
  moelight::gather_rows(args);
}

void scatter_sum(const In& rows, const In& position, const In& weights, const Out& out, bool residual,
                 int64_t threads) {
  check_layout("rows", rows, 2);
  const DType dtype = float_type("rows", rows);
  check_layout("position", position, 2);
  check_int_type<int32_t>("position", position);
  const auto tokens = static_cast<int64_t>(position.shape(0)), top_k = static_cast<int64_t>(position.shape(1));
  const auto hidden = static_cast<int64_t>(rows.shape(1));
  check_layout("weights", weights, 2);
  check_dtype<float>("weights", weights, "float32");
  check_dim("weights", weights, 0, tokens, "tokens");
  check_dim("weights", weights, 1, top_k, "experts of a token");
  check_layout("out", out, 2);
  if (float_type("out", out) != dtype) refuse("out", "must have the dtype of rows");
  check_dim("out", out, 0, tokens, "tokens");
  check_dim("out", out, 1, hidden, "hidden size");
  check_indices("position", position, top_k, std::numeric_limits<int32_t>::min(), static_cast<int64_t>(rows.shape(0)));
  check_apart(out, "rows", rows, extent_bytes(out, dtype), extent_bytes(rows, dtype));
  const ScatterArgs args = {.dtype = dtype,
                            .tokens = tokens,
                            .top_k = top_k,
                            .hidden = hidden,
                            .rows = rows.data(),
                            .row_stride = rows.stride(0),
                            .position = static_cast<const int32_t*>(position.data()),
                            .position_stride = position.stride(0),
                            .weights = static_cast<const float*>(weights.data()),
                            .weight_stride = weights.stride(0),
                            .out = out.data(),
                            .out_stride = out.stride(0),
                            .residual = residual,
                            .threads = checked_threads(threads)};
  nb::gil_scoped_release release;
  moelight::scatter_sum(args);
}

}  // namespace

void add_route(nb::module_& module) {
  module.def("route", route, "logits"_a, "top_k"_a, "normalize"_a, "round"_a, "weights"_a, "ids"_a, "threads"_a);
  module.def("sort_by_expert", sort_by_expert, "ids"_a, "experts"_a, "order"_a, "token"_a, "position"_a, "offsets"_a);
  module.def("gather_rows", gather_rows, "x"_a, "token_of_row"_a, "out"_a, "threads"_a);
  module.def("scatter_sum", scatter_sum, "rows"_a, "position"_a, "weights"_a, "out"_a, "residual"_a, "threads"_a);
}

}  // namespace moelight::bind
