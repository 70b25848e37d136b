// Reads from files: lists of ranges come in, errors go out as what OSError is made of. Does not depend on any disk.

#include "read/reader.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cerrno>
#include <limits>

#include "checks.h"
#include "repack.h"

namespace moelight::bind {
namespace {

using namespace nb::literals;

// (errno, what, file), the arguments of OSError; None where nothing went wrong.
nb::object as_object(const ReadFault& fault) {
  if (fault.none()) return nb::none();
  const int code = fault.code == ReadFault::kEndsEarly ? EIO : fault.code;
  return nb::make_tuple(code, fault.text(), nb::steal(PyUnicode_DecodeFSDefault(fault.path.c_str())));
}

std::shared_ptr<FileReader> open_reader(const std::vector<nb::bytes>& files, int64_t depth, int64_t chunk_bytes,
                                        bool direct) {
  if (depth < 1 || depth > FileReader::kMaxDepth)
    refuse("depth", "must be from 1 to " + std::to_string(FileReader::kMaxDepth) + ", is " + std::to_string(depth));
  if (chunk_bytes < FileReader::kMinChunk || chunk_bytes > FileReader::kMaxChunk ||
      chunk_bytes % FileReader::kMinChunk != 0)
    refuse("chunk_bytes", "must be a multiple of " + std::to_string(FileReader::kMinChunk) + " up to " +
                              std::to_string(FileReader::kMaxChunk) + ", is " + std::to_string(chunk_bytes));
  std::vector<std::string> paths;
  for (const nb::bytes& file : files) paths.emplace_back(file.c_str(), file.size());
  try {
    nb::gil_scoped_release release;
    return FileReader::open(paths, static_cast<int>(depth), chunk_bytes, direct);
  } catch (const ReadFault& fault) {
    PyErr_SetObject(PyExc_OSError, as_object(fault).ptr());
    throw nb::python_error();
  }
}

ReadPart make_part(const FileReader& reader, int64_t file, int64_t offset, const Out& dest) {
  if (file < 0 || file >= reader.files()) refuse("file", "is not one of those that were opened");
  check_bytes("dest", dest);
  const auto bytes = static_cast<int64_t>(dest.shape(0));
  if (offset < 0 || offset > std::numeric_limits<int64_t>::max() / 2 - bytes)
    refuse("offset", "must be a place in a file, is " + std::to_string(offset));
  return {static_cast<int>(file), offset, bytes, static_cast<char*>(dest.data())};
}

// The callback belongs to the interpreter: it is called and let go of under its lock, by a thread of the reader.
ReadRequest::Done make_done(const nb::object& callback) {
  if (callback.is_none()) return nullptr;
  const std::shared_ptr<nb::object> held(new nb::object(callback), [](nb::object* object) {
    nb::gil_scoped_acquire acquire;
    delete object;
  });
  return [held](const ReadFault& fault) {
    nb::gil_scoped_acquire acquire;
    try {
      (*held)(as_object(fault));
    } catch (nb::python_error& error) {
      error.discard_as_unraisable("a callback of a file reader");
    }
  };
}

ReadRequest::Arrange make_arrange(std::vector<Table> tables) {
  if (tables.empty()) return nullptr;
  return [tables = std::move(tables)](char* buffer, int64_t bytes) {
    for (const Table& table : tables) turn(table, buffer, bytes);
  };
}

std::shared_ptr<ReadRequest> submit(FileReader& reader, const std::vector<int64_t>& files,
                                    const std::vector<int64_t>& offsets, const std::vector<Out>& dests,
                                    const std::vector<nb::object>& tables, const nb::object& done) {
  if (files.empty() || files.size() != offsets.size() || files.size() != dests.size() || files.size() != tables.size())
    refuse("parts", "must be at least one, each with file, offset, dest and table");
  std::vector<Table> turned;
  std::vector<ReadPart> parts;
  for (size_t i = 0; i < files.size(); ++i) {
    parts.push_back(make_part(reader, files[i], offsets[i], dests[i]));
    if (!tables[i].is_none()) turned.push_back(to_table("table", tables[i], dests[i], reader.chunk_bytes()));
  }
  return reader.submit(std::move(parts), make_arrange(std::move(turned)), make_done(done));
}

nb::dict counts(const FileReader& reader) {
  const ReadCounts counts = reader.counts();
  nb::dict result;
  result["bytes"] = counts.bytes;
  result["copied_bytes"] = counts.copied_bytes;
  result["reads"] = counts.reads;
  result["busy_s"] = counts.busy_s;
  return result;
}

}  // namespace

void add_read(nb::module_& module) {
  using Release = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<ReadRequest>(module, "ReadRequest")
      .def_prop_ro("finished", &ReadRequest::finished)
      .def("wait", &ReadRequest::wait, "seconds"_a, Release())
      .def("fault", [](const ReadRequest& request) { return as_object(request.fault()); });
  nb::class_<FileReader>(module, "FileReader")
      .def("submit", submit, "files"_a, "offsets"_a, "dests"_a, "tables"_a, "done"_a.none())
      .def("direct", [](const FileReader& reader, int file) { return reader.file(file).direct(); })
      .def("close", &FileReader::close, Release())
      .def("counts", counts);
  module.def("open_reader", open_reader, "files"_a, "depth"_a, "chunk_bytes"_a, "direct"_a);
}

}  // namespace moelight::bind
