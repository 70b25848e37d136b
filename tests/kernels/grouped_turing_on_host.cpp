// grouped_turing.cu for the host: `run` plays a launch of one of its variants.

#include "grouped_turing.cu"

namespace {

constexpr int key(int stored, bool gated, int rows, bool aligned) {
  return ((rows * 8 + stored) * 2 + gated) * 2 + aligned;
}

template <int STORED, bool GATED, int ROWS, bool ALIGNED>
bool chosen(int wanted, std::function<void()>& kernel, const turing::Call& call) {
  if (wanted != key(STORED, GATED, ROWS, ALIGNED)) return false;
  kernel = [&call] { turing::compute<STORED, GATED, ROWS, ALIGNED>(call); };
  return true;
}

}  // namespace

// Writes the first fault into `fault` and returns its length; -1 if the variant is not in this library.
extern "C" int run(int stored, int gated, int rows, int aligned, const turing::Call* call, int blocks,
                   const host::Span* spans, int span_count, char* fault, int room) {
  using namespace turing;
  const int wanted = key(stored, gated != 0, rows, aligned != 0);
  std::function<void()> kernel;
#define VARIANT(...) chosen<__VA_ARGS__>(wanted, kernel, *call) ||
  const bool found = VARIANTS false;
  if (!found) return -1;
  const std::string said = host::launch(blocks, kThreads, spans, span_count, kernel);
  std::snprintf(fault, room, "%s", said.c_str());
  return static_cast<int>(said.size());
}
