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
  const std::string message = code == kEndsEarly ? "the file ends early" : std::strerror(code);
  return message + ", at byte " + std::to_string(offset);
}

ReadFile::ReadFile(std::string path, bool direct) : path_(std::move(path)) {
  struct stat status;
  // Asked before it is opened: opening a pipe waits for its writer.
  if (::stat(path_.c_str(), &status) != 0) throw ReadFault{errno, 0, path_};
  if (S_ISDIR(status.st_mode)) throw ReadFault{EISDIR, 0, path_};
  if (!S_ISREG(status.st_mode)) throw ReadFault{ESPIPE, 0, path_};
  open(direct && kDirect != 0);
}

ReadFile::~ReadFile() { close(); }

void ReadFile::close() {
  if (descriptor_ >= 0) ::close(std::exchange(descriptor_, -1));
}

void ReadFile::open(bool direct) {
  direct_ = direct;
  descriptor_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | (direct ? kDirect : 0));
  if (descriptor_ < 0 && direct && errno == EINVAL) return open(false);
  if (descriptor_ < 0) throw ReadFault{errno, 0, path_};
#ifdef POSIX_FADV_SEQUENTIAL
  if (!direct) ::posix_fadvise(descriptor_, 0, 0, POSIX_FADV_SEQUENTIAL);
#endif
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
    // Only the end of the file cuts a direct read within a page, and nothing can be asked for from there.
    if (got == 0 || (done < needed && done % kPage != 0 && direct()))
      return {ReadFault::kEndsEarly, offset + done, path_};
    advance(pieces, count, static_cast<size_t>(got));
  }
  return {};
}

void ReadFile::forget(int64_t offset, int64_t bytes) const {
#ifdef POSIX_FADV_DONTNEED
  ::posix_fadvise(descriptor_, offset, bytes, POSIX_FADV_DONTNEED);
#endif
}

}  // namespace moelight
