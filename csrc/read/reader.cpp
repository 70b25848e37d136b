#include "reader.h"

#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>
#include <utility>

#include "copy/copy.h"
#include "moelight/signals.h"

namespace moelight {
namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;
// Below this a copy stays in the caches, where its reader may find it.
constexpr int64_t kStreamFrom = int64_t{64} << 10;

// This thread is a reader's.
thread_local bool reading = false;

constexpr int64_t round_down(int64_t n, int64_t unit) { return n / unit * unit; }
constexpr int64_t round_up(int64_t n, int64_t unit) { return round_down(n + unit - 1, unit); }

void copy(char* dst, const char* src, int64_t bytes) {
  if (bytes >= kStreamFrom) {
    stream_copy(dst, src, bytes);
  } else {
    std::memcpy(dst, src, static_cast<size_t>(bytes));
  }
}

iovec piece(char* memory, int64_t bytes) { return {memory, static_cast<size_t>(bytes)}; }

void refuse_to_wait() {
  if (reading) throw std::logic_error("a callback of a reader must not wait for reads: it keeps one of them waiting");
}

}  // namespace

int OfThisProcess::current() { return static_cast<int>(::getpid()); }

bool OfThisProcess::here() const { return process_ == current(); }

void OfThisProcess::check() const {
  if (!here()) throw std::logic_error("a reader serves the process that opened it, not its forks");
}

bool ReadRequest::wait(double seconds) {
  if (finished()) return true;
  home_.check();
  refuse_to_wait();
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return finished(); });
}

void ReadRequest::finish(char* buffer, int64_t bytes) {
  if (arrange_ && fault_.none()) arrange_(buffer, bytes);
  if (done_) {
    done_(fault_);
    done_ = nullptr;
  }
  // Told under the lock: a waiter that sees it may be the last owner.
  std::lock_guard<std::mutex> lock(mutex_);
  finished_.store(true, std::memory_order_release);
  changed_.notify_all();
}

void UnmapMemory::operator()(char* memory) const { ::munmap(memory, bytes); }

FileReader::FileReader(const std::vector<std::string>& paths, int64_t chunk_bytes, bool direct)
    : chunk_bytes_(chunk_bytes) {
  for (const std::string& path : paths) files_.push_back(std::make_unique<ReadFile>(path, direct));
}

std::shared_ptr<FileReader> FileReader::open(const std::vector<std::string>& paths, int depth, int64_t chunk_bytes,
                                             bool direct) {
  std::shared_ptr<FileReader> reader(new FileReader(paths, chunk_bytes, direct), DeleteAtHome<FileReader>());
  reader->start(depth);
  return reader;
}

// The buffers lie on huge pages, where reads need few descriptors, and are no business of children, whose birth would
// otherwise turn pages that a disk is writing to into copies.
void FileReader::start(int depth) {
  const int64_t bounce_bytes = round_up(chunk_bytes_ + ReadFile::kPage, ReadFile::kPage);
  const auto bytes = static_cast<size_t>(bounce_bytes * depth + kHugePage);
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  bounces_ = {static_cast<char*>(memory), UnmapMemory{bytes}};
#ifdef MADV_HUGEPAGE
  ::madvise(memory, bytes, MADV_HUGEPAGE);
  ::madvise(memory, bytes, MADV_DONTFORK);
#endif
  char* first = bounces_.get() + (-reinterpret_cast<intptr_t>(memory) & (kHugePage - 1));
  const NoSignals guard;
  threads_.reserve(static_cast<size_t>(depth));
  for (int i = 0; i < depth; ++i) threads_.emplace_back([this, bounce = first + i * bounce_bytes] { serve(bounce); });
}

std::shared_ptr<ReadRequest> FileReader::submit(std::vector<ReadPart> parts, ReadRequest::Arrange arrange,
                                                ReadRequest::Done done) {
  home_.check();
  std::shared_ptr<ReadRequest> request(new ReadRequest(std::move(parts), std::move(arrange), std::move(done)),
                                       DeleteAtHome<ReadRequest>());
  for (const ReadPart& part : request->parts_) request->chunks_left_ += chunks_of(part);
  const auto wanted = std::min<int64_t>(request->chunks_left_, static_cast<int64_t>(threads_.size()));
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closing_) throw std::logic_error("the reader is closed");
    waiting_.push_back(request);
  }
  for (int64_t i = 0; i < wanted; ++i) wake_.notify_one();
  return request;
}

void FileReader::close() {
  if (!home_.here()) return;
  refuse_to_wait();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  for (const std::unique_ptr<ReadFile>& file : files_) file->close();
}

ReadCounts FileReader::counts() const {
  home_.check();
  std::lock_guard<std::mutex> lock(mutex_);
  ReadCounts counts = counts_;
  if (in_flight_ > 0) {
    counts.busy_s += std::chrono::duration<double>(std::chrono::steady_clock::now() - busy_since_).count();
  }
  return counts;
}

int64_t FileReader::chunks_of(const ReadPart& part) const {
  return std::max<int64_t>(1, round_up(part.bytes, chunk_bytes_) / chunk_bytes_);
}

// Chunks of one part are of one length and meet at aligned bytes of the file, so that only the ends of a part are
// ragged.
FileReader::Chunk FileReader::take() {
  const std::shared_ptr<ReadRequest> request = waiting_.front();
  const ReadPart& part = request->parts_[request->part_];
  const int64_t count = chunks_of(part), i = request->chunk_++;
  const int64_t length = round_up((part.bytes + count - 1) / count, kMinChunk);
  const int64_t origin = round_down(part.offset, kMinChunk), end = part.offset + part.bytes;
  const int64_t from = std::clamp(origin + i * length, part.offset, end);
  const int64_t to = i + 1 == count ? end : std::clamp(origin + (i + 1) * length, part.offset, end);
  if (request->chunk_ == count) {
    request->chunk_ = 0;
    if (++request->part_ == request->parts_.size()) waiting_.pop_front();
  }
  return {request, request->chunks_taken_++, {part.file, from, to - from, part.dst + (from - part.offset)}};
}

void FileReader::serve(char* bounce) {
  reading = true;
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return closing_ || !waiting_.empty(); });
    if (waiting_.empty()) return;
    const Chunk chunk = take();
    ReadRequest& request = *chunk.request;
    // Where one chunk has failed those after it are not worth a read; those before it are under way.
    const bool wanted = request.fault_.none() && chunk.part.bytes > 0;
    lock.unlock();
    int64_t copied = 0;
    ReadFault fault = wanted ? read(chunk.part, bounce, copied) : ReadFault{};
    lock.lock();
    if (wanted && fault.none()) {
      counts_.bytes += chunk.part.bytes;
      counts_.copied_bytes += copied;
    }
    if (!fault.none() && (request.fault_.none() || chunk.number < request.fault_number_)) {
      request.fault_ = std::move(fault);
      request.fault_number_ = chunk.number;
    }
    if (--request.chunks_left_ == 0) {
      lock.unlock();
      request.finish(bounce, chunk_bytes_);
      for (const ReadPart& part : request.parts_) {
        if (!file(part.file).direct()) file(part.file).forget(part.offset, part.bytes);
      }
      lock.lock();
    }
  }
}

ReadFault FileReader::read(const ReadPart& part, char* bounce, int64_t& copied) {
  ReadFile& from = *files_[static_cast<size_t>(part.file)];
  if (from.direct()) return read_directly(from, part, bounce, copied);
  iovec all = piece(part.dst, part.bytes);
  return fetch(from, &all, 1, part.offset, part.bytes);
}

// The pages around the part are read at once: its ragged ends, or all of it, into `bounce`.
ReadFault FileReader::read_directly(ReadFile& from, const ReadPart& part, char* bounce, int64_t& copied) {
  constexpr int64_t kPage = ReadFile::kPage;
  const int64_t end = part.offset + part.bytes, first = round_down(part.offset, kPage);
  const int64_t begin = round_up(part.offset, kPage), stop = round_down(end, kPage);
  const int64_t head = begin - part.offset, tail = end - stop;
  char* const aligned = part.dst + head;
  if (reinterpret_cast<uintptr_t>(aligned) % kPage != 0 || begin >= stop) {
    iovec all = piece(bounce, round_up(end, kPage) - first);
    ReadFault fault = fetch(from, &all, 1, first, end - first);
    if (!fault.none()) return fault;
    copy(part.dst, bounce + (part.offset - first), part.bytes);
    copied = part.bytes;
    return {};
  }
  iovec pieces[3];
  int count = 0;
  if (head > 0) pieces[count++] = piece(bounce, kPage);
  pieces[count++] = piece(aligned, stop - begin);
  if (tail > 0) pieces[count++] = piece(bounce + kPage, kPage);
  ReadFault fault = fetch(from, pieces, count, first, end - first);
  if (!fault.none()) return fault;
  copy(part.dst, bounce + (kPage - head), head);
  copy(part.dst + part.bytes - tail, bounce + kPage, tail);
  copied = head + tail;
  return {};
}

ReadFault FileReader::fetch(ReadFile& file, iovec* pieces, int count, int64_t offset, int64_t needed) {
  using Clock = std::chrono::steady_clock;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (in_flight_++ == 0) busy_since_ = Clock::now();
    ++counts_.reads;
  }
  ReadFault fault = file.read(pieces, count, offset, needed);
  std::lock_guard<std::mutex> lock(mutex_);
  if (--in_flight_ == 0) counts_.busy_s += std::chrono::duration<double>(Clock::now() - busy_since_).count();
  return fault;
}

}  // namespace moelight
