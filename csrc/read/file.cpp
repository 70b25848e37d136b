#include "file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace moelight {
namespace {

#ifdef O_DIRECT
constexpr int kDirect = O_DIRECT;
#else
constexpr int kDirect = 0;
#endif

bool usable(int64_t alignment) {
  return alignment > 0 && alignment <= ReadFile::kMaxAlignment && (alignment & (alignment - 1)) == 0;
}

// The first `bytes` of the pieces are filled.
void advance(iovec*& pieces, int& count, size_t bytes) {
  while (count > 0 && bytes >= pieces->iov_len) {
    bytes -= pieces->iov_len;
    ++pieces, --count;
  }
  if (count > 0) {
    pieces->iov_base = static_cast<char*>(pieces->iov_base) + bytes;
    pieces->iov_len -= bytes;
  }
}

}  // namespace

std::string ReadFault::text() const {
  const std::string what = code == kEndsEarly ? "the file ends early" : std::strerror(code);
  return what + ", at byte " + std::to_string(offset);
}

ReadFile::ReadFile(std::string path, bool direct) : path_(std::move(path)) {
  struct stat status;
  // Asked before it is opened: opening a pipe waits for its writer.
  if (::stat(path_.c_str(), &status) != 0) throw ReadFault{errno, 0, path_};
  if (S_ISDIR(status.st_mode)) throw ReadFault{EISDIR, 0, path_};
  if (!S_ISREG(status.st_mode)) throw ReadFault{ESPIPE, 0, path_};
  open(direct && kDirect != 0);
  if (direct_) find_alignment();
}

ReadFile::~ReadFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void ReadFile::open(bool direct) {
  direct_ = direct;
  descriptor_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | (direct ? kDirect : 0));
  if (descriptor_ < 0 && direct && errno == EINVAL) return open(false);
  if (descriptor_ < 0) throw ReadFault{errno, 0, path_};
}

void ReadFile::find_alignment() {
#ifdef STATX_DIOALIGN
  struct statx extra{};
  if (::statx(descriptor_, "", AT_EMPTY_PATH, STATX_DIOALIGN, &extra) == 0 && (extra.stx_mask & STATX_DIOALIGN) != 0) {
    if (usable(extra.stx_dio_offset_align) && usable(extra.stx_dio_mem_align)) {
      offset_alignment_ = extra.stx_dio_offset_align;
      memory_alignment_ = extra.stx_dio_mem_align;
    } else {
      leave_direct();
    }
    return;
  }
#endif
  probe_alignment();
}

// A kernel or a file system that does not say: the least alignment that is served. Some serve any, without a page cache
// (network file systems) or through it.
void ReadFile::probe_alignment() {
  alignas(kMaxAlignment) static thread_local char block[2 * kMaxAlignment];
  for (const int64_t alignment : {int64_t{1}, int64_t{512}, kMaxAlignment}) {
    char* to = block + alignment % kMaxAlignment;
    if (::pread(descriptor_, to, static_cast<size_t>(alignment), 0) < 0) continue;
    offset_alignment_ = memory_alignment_ = alignment;
    return;
  }
  leave_direct();
}

// From now on the descriptor reads through the page cache.
void ReadFile::leave_direct() {
  direct_ = false;
  ::fcntl(descriptor_, F_SETFL, ::fcntl(descriptor_, F_GETFL) & ~kDirect);
}

ReadFault ReadFile::read(iovec* pieces, int count, int64_t offset, int64_t needed) {
  bool tried_both = false;
  int64_t done = 0;
  while (done < needed) {
    const ssize_t got = ::preadv(descriptor_, pieces, count, offset + done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EINVAL && !tried_both) {
      // Opened directly, but not served so; perhaps another thread has just found out too.
      tried_both = true;
      leave_direct();
      continue;
    }
    if (got < 0) return {errno, offset + done, path_};
    done += got;
    // Only the end of the file cuts a direct read at an odd place, and nothing can be asked for from there.
    if (got == 0 || (done < needed && done % offset_alignment_ != 0))
      return {ReadFault::kEndsEarly, offset + done, path_};
    advance(pieces, count, static_cast<size_t>(got));
  }
#ifdef POSIX_FADV_DONTNEED
  if (offset_alignment_ == 1) ::posix_fadvise(descriptor_, offset, done, POSIX_FADV_DONTNEED);
#endif
  return {};
}

}  // namespace moelight
