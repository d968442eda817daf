// How long this worker is admitted: until the certificate that a broker gave it ends.
//
// The threads that move records check the lease themselves, so it holds even if the thread that renews it
// dies. Two clocks count: CLOCK_BOOTTIME, which also runs while the machine sleeps and which no program sets,
// and the wall clock, by which peers judge the certificate. The lease ends when either clock reaches its end.
#pragma once

#include <time.h>

#include <atomic>
#include <cstdint>
#include <limits>

#include "record/failure.hpp"
#include "record/names.hpp"

namespace sealring {

class Lease {
 public:
  // Sets the lease's ends, in nanoseconds of each clock.
  void extend(int64_t boottime_end, int64_t wall_end) {
    boottime_end_ = boottime_end;
    wall_end_ = wall_end;
  }

  bool ended() const {
    return now(CLOCK_BOOTTIME) >= boottime_end_ || now(CLOCK_REALTIME) >= wall_end_;
  }

  // Throws if the lease has ended. `rank` is this worker's.
  void require(int rank, const Names& names) const {
    if (ended()) {
      throw Failure(
          FailureCode::no_longer_admitted, rank,
          "the certificate of " + names.rank(rank) + " has ended, and the broker did not renew it");
    }
  }

 private:
  static int64_t now(clockid_t clock) {
    timespec time{};
    ::clock_gettime(clock, &time);
    return static_cast<int64_t>(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
  }

  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
  std::atomic<int64_t> boottime_end_{kNever};
  std::atomic<int64_t> wall_end_{kNever};
};

}  // namespace sealring
