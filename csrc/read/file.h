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
  // No file system asks for more than a page.
  static constexpr int64_t kMaxAlignment = 4096;

  // `direct` asks for reads past the page cache; where the file system refuses, they go through it and let go of their
  // pages at once. Throws ReadFault: not there, not readable, not a regular file.
  ReadFile(std::string path, bool direct);
  ~ReadFile();
  ReadFile(const ReadFile&) = delete;
  ReadFile& operator=(const ReadFile&) = delete;

  const std::string& path() const { return path_; }
  bool direct() const { return direct_; }
  // Offsets and lengths, and addresses, are multiples of these (powers of two) in every read.
  int64_t offset_alignment() const { return offset_alignment_; }
  int64_t memory_alignment() const { return memory_alignment_; }

  // From `offset` on into the pieces of memory, one after the other, until at least `needed` bytes are there. The
  // pieces are used up.
  ReadFault read(iovec* pieces, int count, int64_t offset, int64_t needed);

 private:
  void open(bool direct);
  void find_alignment();
  void probe_alignment();
  void leave_direct();

  std::string path_;
  int descriptor_ = -1;
  std::atomic<bool> direct_{false};
  int64_t offset_alignment_ = 1;
  int64_t memory_alignment_ = 1;
};

}  // namespace moelight
