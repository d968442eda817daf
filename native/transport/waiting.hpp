// How a thread that moves records waits when nothing can move.
#pragma once

#include <chrono>
#include <vector>

#include "transport/link.hpp"

namespace sealring {

using Clock = std::chrono::steady_clock;

// Yields the core for a short time before the thread sleeps. With more ranks than cores, the rank that this
// one waits for may need this very core.
class Backoff {
 public:
  void progressed() { progressing_ = true; }
  // Yields the core once. False if it is time to sleep instead.
  bool yield_core();
  double idle_s() const;

 private:
  Clock::time_point last_progress_ = Clock::now();
  // Until then other programs are taken to use the cores. Yielding would then cost whole time slices, while a
  // thread that sleeps is woken at once.
  Clock::time_point crowded_until_{};
  bool progressing_ = true;
};

// The longest sleep. After it the links are checked in any case.
inline constexpr int kNapMs = 100;
// A device wakes no thread, so it is polled: at first every kPollDeviceUs, later, together with the links,
// every kPollDeviceMs.
inline constexpr unsigned kPollDeviceUs = 20;
inline constexpr int kPollDeviceMs = 1;

// Sleeps until a peer has moved something, `wake` (a descriptor, or -1) can be read, or the time has
// passed. Returns how long it slept; zero if there was something to do after all.
std::chrono::nanoseconds sleep_on(const std::vector<Link*>& links, int wake, int milliseconds);

}  // namespace sealring
