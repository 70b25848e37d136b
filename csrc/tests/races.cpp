// The pool, teams and the reader under a race detector: many callers at once, errors, callbacks, closing in flight.
// Fails by an exit status that is not 0.

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "moelight/threads.h"
#include "read/reader.h"

namespace {

constexpr int64_t kSize = int64_t{1} << 20;
constexpr int kCallers = 4;

void require(bool holds, const char* message) {
  if (holds) return;
  std::fprintf(stderr, "races: %s\n", message);
  std::exit(1);
}

template <class F>
void at_once(F&& body) {
  std::vector<std::thread> callers;
  for (int caller = 0; caller < kCallers; ++caller) callers.emplace_back([&body, caller] { body(caller); });
  for (std::thread& caller : callers) caller.join();
}

void pool() {
  at_once([](int caller) {
    for (int round = 0; round < 300; ++round) {
      const int threads = 1 + (caller + round) % 5;
      std::vector<int64_t> sums(static_cast<size_t>(round % 40));
      const auto n = static_cast<int64_t>(sums.size());
      moelight::parallel_for(threads, n, [&](int64_t i, int) {
        moelight::parallel_for(threads, i, [&](int64_t j, int) { sums[static_cast<size_t>(i)] += j; });
      });
      for (int64_t i = 0; i < n; ++i)
        require(sums[static_cast<size_t>(i)] == i * (i - 1) / 2, "a body did not run once");
    }
  });
}

// Two callers a team, two teams beside the threads all share, places that are not there, and an end in flight.
void teams() {
  const auto tally = [](int rounds) {
    for (int round = 0; round < rounds; ++round) {
      std::vector<int64_t> seen(static_cast<size_t>(round % 40));
      moelight::parallel_for(4, static_cast<int64_t>(seen.size()), [&](int64_t i, int) { ++seen[size_t(i)]; });
      for (const int64_t times : seen) require(times == 1, "a body of a team did not run once");
    }
  };
  const auto bound = std::make_shared<moelight::ThreadTeam>(3, std::vector<moelight::Place>{{0}, {1}, {900, 5000}});
  const auto loose = std::make_shared<moelight::ThreadTeam>(2, std::vector<moelight::Place>{});
  at_once([&](int caller) {
    moelight::use_team(caller % 2 == 0 ? bound : loose);
    tally(300);
    if (caller == 0) bound->end();
    tally(50);
    require(moelight::use_team(nullptr) == (caller % 2 == 0 ? bound : loose), "another team was left behind");
    tally(50);
  });
  for (int round = 0; round < 50; ++round) {
    moelight::use_team(std::make_shared<moelight::ThreadTeam>(3, std::vector<moelight::Place>{}));
    tally(3);
  }
  moelight::use_team(nullptr);
}

char byte_at(int64_t offset) { return static_cast<char>(offset * 131 + offset / 4096); }

std::string make_file() {
  std::string path = "races-XXXXXX";
  const int descriptor = ::mkstemp(path.data());
  std::vector<char> content(kSize);
  for (int64_t i = 0; i < kSize; ++i) content[static_cast<size_t>(i)] = byte_at(i);
  require(::write(descriptor, content.data(), kSize) == kSize, "the file was not written");
  ::close(descriptor);
  return path;
}

void read_some(moelight::FileReader& reader, int caller) {
  for (int round = 0; round < 60; ++round) {
    const int64_t offset = (caller * 7919 + round * 10'007) % (kSize / 2), bytes = 40'000 + round;
    std::vector<char> dst(static_cast<size_t>(bytes));
    std::atomic<bool> told{false};
    const bool beyond = round % 10 == 9;
    const auto request = reader.submit(
        {{0, beyond ? kSize - 100 : offset, bytes, dst.data()}},
        [&](char* buffer, int64_t size) {
          std::memset(buffer, 0, static_cast<size_t>(size));
          std::reverse(dst.begin(), dst.end());
        },
        [&](const moelight::ReadFault& fault) { told = fault.none() != beyond; });
    do {
      reader.counts();
    } while (!request->wait(0.001));
    require(told && request->fault().none() != beyond, "what went wrong was not told");
    for (int64_t i = 0; !beyond && i < bytes; i += 977)
      require(dst[static_cast<size_t>(bytes - 1 - i)] == byte_at(offset + i), "a byte is wrong");
  }
}

void reader(const std::string& path, bool direct) {
  const auto open = [&] { return moelight::FileReader::open({path}, 3, 16'384, direct); };
  const auto shared = open();
  at_once([&](int caller) { read_some(*shared, caller); });
  for (int round = 0; round < 50; ++round) {
    std::vector<char> dst(200'000);
    const auto closing = open();
    closing->submit({{0, round, 200'000, dst.data()}}, nullptr, nullptr);
    closing->close();
    require(dst[199'999] == byte_at(199'999 + round), "closing did not wait");
  }
}

}  // namespace

int main() {
  pool();
  teams();
  const std::string path = make_file();
  reader(path, true);
  reader(path, false);
  ::unlink(path.c_str());
  std::puts("races: none found");
}
