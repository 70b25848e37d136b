// A file open for reading past the page cache. Knows descriptors and alignment.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

struct iovec;  // of <sys/uio.h>

namespace moelight {

// What went wrong, and at which byte of which file. `code` is an errno; kNone where nothing did.
struct ReadFault {
  static constexpr int kNone = 0;
  static constexpr int kEndsEarly = -1;

  int code = kNone;
  int64_t offset = 0;
  std::string path;

  bool none() const { return code == kNone; }
  std::string text() const;
};

class ReadFile {
 public:
  // Of offsets, lengths and addresses in a direct read. Many disks serve 512 bytes too, but more slowly (2.6 GB/s where
  // whole pages come at 3.7); none is known that wants more.
  static constexpr int64_t kPage = 4096;

  // `direct` asks for reads past the page cache; where the file system refuses, they go through it. Throws ReadFault:
  // not there, not readable, not a regular file.
  ReadFile(std::string path, bool direct);
  ~ReadFile();
  ReadFile(const ReadFile&) = delete;
  ReadFile& operator=(const ReadFile&) = delete;

  // Nobody reads any more.
  void close();
  bool direct() const { return direct_.load(std::memory_order_relaxed); }

  // From `offset` on into the pieces of memory, one after the other, until at least `needed` bytes are there. The
  // pieces are used up.
  ReadFault read(iovec* pieces, int count, int64_t offset, int64_t needed);
  // What was read here is not wanted in the page cache.
  void forget(int64_t offset, int64_t bytes) const;

 private:
  void open(bool direct);
  void leave_direct();

  const std::string path_;
  int descriptor_ = -1;
  std::atomic<bool> direct_{false};
};

}  // namespace moelight
