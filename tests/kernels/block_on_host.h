// A block of CUDA threads in host memory: what grouped_turing.cu needs of a card, for g++ or clang.
//
// Every thread is a fiber (ucontext) of one thread of the host. The lanes of a warp meet at each instruction of the warp
// (ldmatrix, mma.sync, a shared store), the warps of a block only at __syncthreads: between two of these one warp runs as
// far as it can before the next one starts, the lowest first in even blocks and the highest first in odd ones, so what is
// read without a barrier is not there yet. Also checked: global reads and writes stay inside the spans that were given
// and begin at multiples of their size, lanes of a warp meet at the same instruction, and shared accesses are inside the
// buffer and meet no bank twice. The first fault ends the launch; `host::launch` returns it in words.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#define DEVICE inline
#define SHARED(name, count)                  \
  alignas(128) static Words name[count];     \
  host::machine.shared = name;               \
  host::machine.shared_bytes = sizeof(name)

struct alignas(16) Words {
  unsigned x, y, z, w;
};

namespace host {

struct Index {
  unsigned x;
};

// Bytes that a launch may read, and write where `written`.
struct Span {
  const unsigned char* begin;
  int64_t bytes;
  int64_t written;
};

constexpr int kLanes = 32;
constexpr size_t kStack = 256 << 10;

enum class State { ready, in_warp, in_block, done };

struct Fiber {
  ucontext_t context;
  std::vector<unsigned char> stack;
  State state;
};

struct Meeting {
  const char* what;
  void* given[kLanes];
  int arrived;
};

struct Machine {
  std::vector<Fiber> fibers;
  std::vector<Meeting> meetings;
  std::vector<Span> spans;
  std::function<void()> kernel;
  ucontext_t home;
  std::string fault;
  Words* shared;
  size_t shared_bytes;
  int current;
  bool descending;
};

inline Machine machine;
inline Index block_index, thread_index;

[[noreturn]] inline void fail(const std::string& what) {
  machine.fault = "block " + std::to_string(block_index.x) + ", thread " + std::to_string(machine.current) + ": " + what;
  setcontext(&machine.home);
  std::abort();
}

// The next ready fiber: of the same warp, then of the other warps in their order; -1 if there is none.
inline int next_ready() {
  const int count = static_cast<int>(machine.fibers.size()), warp = machine.current / kLanes;
  for (int i = 1; i <= kLanes; ++i) {
    const int lane = warp * kLanes + (machine.current + i) % kLanes;
    if (machine.fibers[lane].state == State::ready) return lane;
  }
  for (int i = 0; i < count; ++i) {
    const int fiber = machine.descending ? count - 1 - i : i;
    if (machine.fibers[fiber].state == State::ready) return fiber;
  }
  return -1;
}

inline void go_on() {
  const int before = machine.current;
  int next = next_ready();
  if (next < 0) {
    size_t waiting = 0, done = 0;
    for (const Fiber& fiber : machine.fibers) {
      waiting += fiber.state == State::in_block;
      done += fiber.state == State::done;
    }
    if (done == machine.fibers.size()) setcontext(&machine.home);
    if (waiting < machine.fibers.size()) fail("some threads wait for others that never come");
    for (Fiber& fiber : machine.fibers) fiber.state = State::ready;
    next = machine.descending ? static_cast<int>(machine.fibers.size()) - 1 : 0;
  }
  if (next == before) return;
  machine.current = next;
  thread_index.x = static_cast<unsigned>(next);
  swapcontext(&machine.fibers[before].context, &machine.fibers[next].context);
}

inline void run_fiber() {
  machine.kernel();
  machine.fibers[machine.current].state = State::done;
  go_on();
}

// The lanes of a warp meet; the last one calls `together` with what each has given.
template <class Given, class Together>
void meet(const char* what, Given& given, Together together) {
  Meeting& meeting = machine.meetings[machine.current / kLanes];
  if (meeting.arrived == 0) meeting.what = what;
  if (meeting.what != what) fail(std::string(what) + " where other lanes are at " + meeting.what);
  meeting.given[machine.current % kLanes] = &given;
  if (++meeting.arrived < kLanes) {
    machine.fibers[machine.current].state = State::in_warp;
    go_on();
    return;
  }
  Given* all[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) all[lane] = static_cast<Given*>(meeting.given[lane]);
  together(all);
  meeting.arrived = 0;
  for (int lane = 0; lane < kLanes; ++lane)
    machine.fibers[machine.current / kLanes * kLanes + lane].state = State::ready;
}

inline void check_global(const void* address, size_t bytes, bool written) {
  const auto* begin = static_cast<const unsigned char*>(address);
  if (reinterpret_cast<uintptr_t>(address) % bytes) fail(std::to_string(bytes) + " bytes at an address in between");
  for (const Span& span : machine.spans)
    if (begin >= span.begin && begin + bytes <= span.begin + span.bytes && (span.written || !written)) return;
  fail(std::string(written ? "a write" : "a read") + " outside of what was given");
}

// 16 bytes for each of eight lanes at once: inside the buffer, and no bank twice.
inline void check_shared(const Words* const (&addresses)[8]) {
  unsigned banks = 0;
  for (const Words* address : addresses) {
    if (address < machine.shared || address >= machine.shared + machine.shared_bytes / sizeof(Words))
      fail("a shared access outside of the buffer");
    banks |= 1u << (address - machine.shared) % 8;
  }
  if (banks != 0xff) fail("a shared access that meets a bank twice");
}

// Run `kernel` once for each of `blocks` blocks of `threads` threads; return the first fault, or nothing.
inline std::string launch(int blocks, int threads, const Span* spans, int span_count, std::function<void()> kernel) {
  machine.spans.assign(spans, spans + span_count);
  machine.kernel = std::move(kernel);
  machine.fault.clear();
  machine.fibers.resize(threads);
  for (volatile int block = 0; block < blocks; block = block + 1) {
    machine.meetings.assign(threads / kLanes, Meeting{});
    machine.descending = block % 2 == 1;
    block_index.x = static_cast<unsigned>(block);
    for (Fiber& fiber : machine.fibers) {
      fiber.stack.resize(kStack);
      fiber.state = State::ready;
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.data();
      fiber.context.uc_stack.ss_size = fiber.stack.size();
      fiber.context.uc_link = nullptr;
      makecontext(&fiber.context, run_fiber, 0);
    }
    machine.current = machine.descending ? threads - 1 : 0;
    thread_index.x = static_cast<unsigned>(machine.current);
    swapcontext(&machine.home, &machine.fibers[machine.current].context);
    if (!machine.fault.empty()) break;
  }
  return machine.fault;
}

inline float half_to_float(unsigned short half) {
  const int exponent = half >> 10 & 31, fraction = half & 1023;
  const float size = exponent == 0    ? std::ldexp(static_cast<float>(fraction), -24)
                     : exponent == 31 ? (fraction ? NAN : INFINITY)
                                      : std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
  return half >> 15 ? -size : size;
}

// To the nearest, ties to even.
inline unsigned short float_to_half(float value) {
  const unsigned short sign = std::signbit(value) ? 0x8000 : 0;
  const float size = std::fabs(value);
  if (size == 0.0f) return sign;
  if (std::isnan(value)) return sign | 0x7e00;
  if (size >= 65520.0f) return sign | 0x7c00;
  int exponent = 0;
  std::frexp(size, &exponent);
  const int step = exponent < -13 ? -24 : exponent - 11;
  const auto steps = static_cast<int>(std::nearbyint(std::ldexp(size, -step)));
  return sign | static_cast<unsigned short>(step == -24 ? steps : ((step + 24) << 10) + steps);
}

}  // namespace host

#define blockIdx host::block_index
#define threadIdx host::thread_index

inline void __syncthreads() {
  if (host::machine.meetings[host::machine.current / host::kLanes].arrived) host::fail("a barrier inside of a warp");
  host::machine.fibers[host::machine.current].state = host::State::in_block;
  host::go_on();
}

inline float __expf(float value) { return std::exp(value); }

inline unsigned short to_half(float value) { return host::float_to_half(value); }

inline float from_half(unsigned short half) { return host::half_to_float(half); }

inline float as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline unsigned subtract_halves(unsigned left, unsigned right) {
  const auto difference = [&](int shift) -> unsigned {
    return to_half(from_half(static_cast<unsigned short>(left >> shift)) -
                   from_half(static_cast<unsigned short>(right >> shift)));
  };
  return difference(0) | difference(16) << 16;
}

template <class T>
T load(const T* from) {
  host::check_global(from, sizeof(T), false);
  return *from;
}

template <class T>
void store(T* into, T value) {
  host::check_global(into, sizeof(T), true);
  std::memcpy(into, &value, sizeof value);
}

inline Words load_words(const void* from) {
  host::check_global(from, sizeof(Words), false);
  Words found;
  std::memcpy(&found, from, sizeof found);
  return found;
}

inline void store_shared(Words* into, const Words& value) {
  struct Given {
    Words* into;
    const Words* value;
  } given{into, &value};
  host::meet("st.shared", given, [](Given** all) {
    for (int first = 0; first < host::kLanes; first += 8) {
      const Words* addresses[8];
      for (int i = 0; i < 8; ++i) addresses[i] = all[first + i]->into;
      host::check_shared(addresses);
      for (int i = 0; i < 8; ++i) *all[first + i]->into = *all[first + i]->value;
    }
  });
}

inline void load_matrices(unsigned (&found)[4], const Words* row) {
  struct Given {
    unsigned* found;
    const Words* row;
  } given{found, row};
  host::meet("ldmatrix", given, [](Given** all) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      const Words* rows[8];
      for (int i = 0; i < 8; ++i) rows[i] = all[matrix * 8 + i]->row;
      host::check_shared(rows);
      for (int lane = 0; lane < host::kLanes; ++lane)
        std::memcpy(&all[lane]->found[matrix], reinterpret_cast<const unsigned char*>(rows[lane / 4]) + lane % 4 * 4, 4);
    }
  });
}

inline void multiply_add(float (&sums)[4], unsigned a_top, unsigned a_bottom, unsigned b) {
  struct Given {
    float* sums;
    unsigned a[2], b;
  } given{sums, {a_top, a_bottom}, b};
  host::meet("mma.sync", given, [](Given** all) {
    float a[16][8], b[8][8];
    for (int lane = 0; lane < host::kLanes; ++lane) {
      for (int i = 0; i < 2; ++i) {
        const auto number = [&](unsigned pair) { return from_half(static_cast<unsigned short>(pair >> (16 * i))); };
        a[lane / 4][lane % 4 * 2 + i] = number(all[lane]->a[0]);
        a[lane / 4 + 8][lane % 4 * 2 + i] = number(all[lane]->a[1]);
        b[lane % 4 * 2 + i][lane / 4] = number(all[lane]->b);
      }
    }
    for (int lane = 0; lane < host::kLanes; ++lane) {
      for (int i = 0; i < 4; ++i) {
        float sum = all[lane]->sums[i];
        for (int k = 0; k < 8; ++k) sum += a[lane / 4 + i / 2 * 8][k] * b[k][lane % 4 * 2 + i % 2];
        all[lane]->sums[i] = sum;
      }
    }
  });
}
