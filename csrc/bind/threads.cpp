// Teams of threads for the lanes of a run. Does not depend on kernels.

#include "moelight/threads.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include "checks.h"

namespace moelight::bind {
namespace {

using namespace nb::literals;

std::shared_ptr<ThreadTeam> make_team(int64_t threads, std::vector<Place> places) {
  for (const Place& cpus : places) {
    if (cpus.empty()) refuse("places", "each must name a processor");
    for (const int processor : cpus)
      if (processor < 0 || processor >= (1 << 16)) refuse("places", "a processor is " + std::to_string(processor));
  }
  if (!places.empty() && static_cast<int64_t>(places.size()) != threads)
    refuse("places", "must be one for each of the " + std::to_string(threads) + " threads");
  return std::make_shared<ThreadTeam>(checked_threads(threads), std::move(places));
}

}  // namespace

void add_threads(nb::module_& module) {
  nb::class_<ThreadTeam>(module, "ThreadTeam").def("end", &ThreadTeam::end, nb::call_guard<nb::gil_scoped_release>());
  module.def("make_team", make_team, "threads"_a, "places"_a);
  module.def("use_team", use_team, "team"_a.none());
}

}  // namespace moelight::bind
