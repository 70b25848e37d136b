// Tables that are turned: their sizes and memory are checked here.

#include "repack.h"

#include <memory>
#include <new>

namespace moelight::bind {
namespace {

using namespace nb::literals;

constexpr const char* kCellNames[] = {"bytes", "halves", "words", "awq codes"};
constexpr int64_t kMaxCells = int64_t{1} << 31;

Cells cells_named(const char* name, const char* cells) {
  for (int i = 0; i < static_cast<int>(std::size(kCellNames)); ++i)
    if (std::string(cells) == kCellNames[i]) return static_cast<Cells>(i);
  refuse(name, std::string("cells '") + cells + "' are not turned");
}

void repack(const Out& dest, nb::tuple table, int64_t buffer_bytes) {
  const Table checked = to_table("table", table, dest, buffer_bytes);
  nb::gil_scoped_release release;
  const std::unique_ptr<char[]> buffer(new char[static_cast<size_t>(buffer_bytes)]);
  turn(checked, buffer.get(), buffer_bytes);
}

}  // namespace

Table to_table(const char* name, nb::handle item, const Out& dest, int64_t buffer_bytes) {
  const auto from = nb::cast<nb::tuple>(item);
  if (nb::len(from) != 6) refuse(name, "must be cells, lines, width, awq_order, bits and bias");
  check_bytes(name, dest);
  const Table table = {cells_named(name, nb::cast<const char*>(from[0])),
                       nb::cast<int64_t>(from[1]),
                       nb::cast<int64_t>(from[2]),
                       static_cast<char*>(dest.data()),
                       nb::cast<bool>(from[3]),
                       nb::cast<int>(from[4]),
                       nb::cast<int>(from[5])};
  if (table.lines < 1 || table.width < 1 || table.lines > kMaxCells || table.width > kMaxCells / table.lines)
    refuse(name, "has a size that is not turned");
  const bool codes = table.bits != 0;
  if (codes && (table.cells != Cells::kWords || (table.bits != 2 && table.bits != 4 && table.bits != 8)))
    refuse(name, "words of codes of 2, 4 and 8 bits are changed");
  if (table.awq_order && table.bits != 4) refuse(name, "the order of AWQ is that of codes of 4 bits");
  if (table.cells == Cells::kAwqCodes && table.width % 8 != 0) refuse(name, "needs a multiple of 8 rows");
  check_dim(name, dest, 0, table.bytes(), "bytes");
  if (table.line_bytes() > buffer_bytes)
    refuse(name, "lines of " + std::to_string(table.line_bytes()) + " bytes are turned in no room of " +
                     std::to_string(buffer_bytes));
  return table;
}

void add_repack(nb::module_& module) { module.def("repack", repack, "dest"_a, "table"_a, "room_bytes"_a); }

}  // namespace moelight::bind
