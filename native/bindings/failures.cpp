#include "bindings/failures.hpp"

#include <nanobind/stl/map.h>
#include <nanobind/stl/set.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <tuple>

#include "bindings/bind.hpp"
#include "record/first_failure.hpp"
#include "record/lease.hpp"
#include "record/names.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace sealring {

namespace {

using Clock = std::chrono::steady_clock;

// While another thread runs Python or collects garbage, getting the GIL takes long, and the collective stands
// still meanwhile. So the GIL is not taken before every sleep, and the longer it took, the later it is taken
// again. This costs at most a tenth of the time, and Ctrl-C is noticed after at most two seconds.
constexpr std::chrono::milliseconds kBetweenQuestions{50}, kLongest{2000};
constexpr int kTimesAsLong = 10;

// Python runs signal handlers only on the main thread.
bool is_main_thread() { return ::syscall(SYS_gettid) == ::getpid(); }

}  // namespace

bool signal_pending(const ProcessMark& process) {
  thread_local Clock::time_point next;
  bool pending = false;
  if (const auto asked = Clock::now(); asked >= next && is_main_thread()) {
    const nb::gil_scoped_acquire held;
    const auto got = Clock::now();
    pending = PyErr_CheckSignals() != 0;
    next = Clock::now() +
           std::clamp<Clock::duration>((got - asked) * kTimesAsLong, kBetweenQuestions, kLongest);
  }
  process.require("this process group");  // a signal handler may have forked
  return pending;
}

}  // namespace sealring

using namespace sealring;

void bind_failures(nb::module_& m) {
  nb::class_<Failure>(m, "Failure")
      .def(
          "__init__",
          [](Failure* self, FailureCode code, const std::string& text, int peer,
             uint64_t collective, int reported_by, int told_by) {
            new (self) Failure(code, peer, text);
            self->collective = collective;
            self->reported_by = reported_by;
            self->told_by = told_by;
          },
          "code"_a, "text"_a, "peer"_a = -1, "collective"_a = 0, "reported_by"_a = -1,
          "told_by"_a = -1)
      .def_ro("code", &Failure::code)
      .def_ro("peer", &Failure::peer)
      .def_ro("collective", &Failure::collective)
      .def_ro("reported_by", &Failure::reported_by)
      .def_ro("told_by", &Failure::told_by)
      .def_prop_ro("text", &Failure::text)
      .def("__eq__",
           [](const Failure& self, const Failure& other) {
             return self.says_the_same_as(other) && self.text() == other.text();
           })
      .def("__reduce__", [](const Failure& self) {
        return nb::make_tuple(nb::type<Failure>(),
                              nb::make_tuple(self.code, self.text(), self.peer, self.collective,
                                             self.reported_by, self.told_by));
      });

  nb::class_<Names>(m, "Names")
      .def(
          "__init__",
          [](Names* self, std::vector<int> members, std::map<uint8_t, std::string> operations,
             std::map<uint8_t, std::string> algorithms, std::set<uint8_t> rooted,
             std::map<uint8_t, std::string> remarks) {
            new (self) Names{std::move(members), std::move(operations), std::move(algorithms),
                             std::move(rooted), std::move(remarks)};
          },
          "members"_a, "operations"_a, "algorithms"_a, "rooted"_a, "remarks"_a)
      .def("rank", &Names::rank, "rank"_a);

  nb::class_<FirstFailure>(m, "FirstFailure")
      .def(nb::init<>())
      .def("settle", &FirstFailure::settle, "failure"_a);

  nb::class_<Lease>(m, "Lease")
      .def(nb::init<>())
      .def("extend", &Lease::extend, "boottime_end"_a, "wall_end"_a)
      .def_prop_ro("ended", &Lease::ended);
}
