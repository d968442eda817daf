// Notices that a driver does not answer any more, where nobody could be told by an error.
//
// While it is needed, one thread calls `probe` again and again, and another sees whether it comes
// back. Neither ever ends: a probe that hangs cannot be ended.
#pragma once

#include <chrono>
#include <functional>
#include <mutex>

namespace sealring {

class DriverWatch {
 public:
  // `gave_up` is called once, from a thread of the watch, when a probe has not come back in time.
  DriverWatch(std::function<bool()> needed, std::function<void()> probe,
              std::function<void()> gave_up);

  // The shortest time asked for counts.
  void expect_within(double seconds);

 private:
  using Clock = std::chrono::steady_clock;

  void keep_probing();
  void keep_watching();
  bool overdue();

  const std::function<bool()> needed_;
  const std::function<void()> probe_;
  const std::function<void()> gave_up_;
  std::mutex lock_;
  double patience_s_ = 0;
  bool probing_ = false;
  Clock::time_point since_;
};

}  // namespace sealring
