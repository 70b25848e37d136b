// Reads from files into memory by threads that do nothing else. Knows bytes and files; owns no memory that it fills.
//
// A request is a list of parts, each a range of a file and where it goes. It is cut into chunks, which the threads take
// in order: as many reads are in flight as there are threads. Where a part lies in its pages of memory as it lies in
// those of its file, a chunk is read into its place and only its ragged ends are copied; elsewhere it is read into a
// buffer of the thread and copied from there. What cannot be read directly is read into its place, and its pages let go
// of.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "file.h"

namespace moelight {

struct ReadPart {
  int file;
  int64_t offset;
  int64_t bytes;
  char* dst;
};

struct ReadCounts {
  int64_t bytes = 0;         // put into their places
  int64_t copied_bytes = 0;  // of these, by way of a thread's buffer
  int64_t reads = 0;
  double busy_s = 0;  // with at least one read in flight
};

// A child of fork() has none of the threads, and perhaps locks that nobody will open: it leaves what it inherits alone.
class OfThisProcess {
 public:
  bool here() const;
  // Throws std::logic_error in a child.
  void check() const;

 private:
  const int process_ = current();
  static int current();
};

template <class T>
struct DeleteAtHome {
  void operator()(T* object) const {
    if (object->home().here()) delete object;
  }
};

class ReadRequest {
 public:
  // Called once by a reading thread when all is read, before `wait` returns. Must not throw.
  using Done = std::function<void(const ReadFault&)>;
  // Called by the same thread before that, if nothing went wrong: puts what was read into another order, by way of
  // `bytes` of `buffer`, which are a chunk's at least. Must not throw.
  using Arrange = std::function<void(char* buffer, int64_t bytes)>;

  ReadRequest(std::vector<ReadPart> parts, Arrange arrange, Done done)
      : parts_(std::move(parts)), arrange_(std::move(arrange)), done_(std::move(done)) {}

  const OfThisProcess& home() const { return home_; }
  bool finished() const { return finished_.load(std::memory_order_acquire); }
  // Whether all was read within `seconds`. Throws std::logic_error inside a Done, which could wait for itself.
  bool wait(double seconds);
  // What went wrong first, in the order of parts; only once finished.
  const ReadFault& fault() const { return fault_; }

 private:
  friend class FileReader;
  void finish(char* buffer, int64_t bytes);

  const OfThisProcess home_;
  const std::vector<ReadPart> parts_;
  Arrange arrange_;
  Done done_;
  // The next chunk, and how many chunks are not read yet. Guarded by the reader, as is the fault until all is read.
  size_t part_ = 0;
  int64_t chunk_ = 0;
  int64_t chunks_taken_ = 0;
  int64_t chunks_left_ = 0;
  ReadFault fault_;
  int64_t fault_number_ = 0;  // of the chunk that has it

  std::atomic<bool> finished_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
};

struct UnmapMemory {
  size_t bytes = 0;
  void operator()(char* memory) const;
};

class FileReader {
 public:
  static constexpr int kMaxDepth = 64;
  static constexpr int64_t kMinChunk = ReadFile::kPage;
  static constexpr int64_t kMaxChunk = int64_t{64} << 20;

  // `chunk_bytes` is a multiple of kMinChunk. Throws ReadFault where a file cannot be opened, std::system_error where
  // there are no threads to be had, std::bad_alloc.
  static std::shared_ptr<FileReader> open(const std::vector<std::string>& paths, int depth, int64_t chunk_bytes,
                                          bool direct);
  ~FileReader() { close(); }
  FileReader(const FileReader&) = delete;
  FileReader& operator=(const FileReader&) = delete;

  const OfThisProcess& home() const { return home_; }
  const ReadFile& file(int index) const { return *files_[static_cast<size_t>(index)]; }
  int files() const { return static_cast<int>(files_.size()); }
  int64_t chunk_bytes() const { return chunk_bytes_; }

  // Memory and lengths are the caller's promise. Throws std::logic_error after close() and in the child of a fork.
  std::shared_ptr<ReadRequest> submit(std::vector<ReadPart> parts, ReadRequest::Arrange arrange,
                                      ReadRequest::Done done);
  // Returns when all that was submitted is read and the threads have ended; from one thread only. Throws
  // std::logic_error inside a Done.
  void close();
  ReadCounts counts() const;

 private:
  struct Chunk {
    std::shared_ptr<ReadRequest> request;
    int64_t number;
    ReadPart part;
  };

  FileReader(const std::vector<std::string>& paths, int64_t chunk_bytes, bool direct);
  void start(int depth);
  int64_t chunks_of(const ReadPart& part) const;
  Chunk take();
  void serve(char* bounce);
  ReadFault read(const ReadPart& part, char* bounce, int64_t& copied);
  ReadFault read_directly(ReadFile& file, const ReadPart& part, char* bounce, int64_t& copied);
  ReadFault fetch(ReadFile& file, iovec* pieces, int count, int64_t offset, int64_t needed);

  const OfThisProcess home_;
  std::vector<std::unique_ptr<ReadFile>> files_;
  const int64_t chunk_bytes_;
  std::unique_ptr<char, UnmapMemory> bounces_;

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::shared_ptr<ReadRequest>> waiting_;  // with chunks that no thread has taken
  bool closing_ = false;
  ReadCounts counts_;
  int in_flight_ = 0;
  std::chrono::steady_clock::time_point busy_since_;
  std::vector<std::thread> threads_;
};

}  // namespace moelight
