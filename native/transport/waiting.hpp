// How whoever runs a link's traffic waits when nothing can move.
#pragma once

#include <chrono>
#include <vector>

#include "transport/link.hpp"

namespace sealring {

using Clock = std::chrono::steady_clock;

// Looks again and again for a while, lending the core to others, before it says to sleep. With more
// ranks than cores, whoever we wait for may need this very core.
class Backoff {
 public:
  void progressed() { progressing_ = true; }
  // Lends the core once. False if it is time to sleep instead.
  bool yield_core();
  double idle_s() const;

 private:
  Clock::time_point last_progress_ = Clock::now();
  // Others than our peers want the cores too: lending then costs whole time slices, while a sleeper
  // is woken at once.
  Clock::time_point crowded_until_{};
  bool progressing_ = true;
};

// Sleeps until a peer has moved something, `wake` (a descriptor, or -1) can be read, or the time is
// over. Returns how long it slept; zero if there was something to do after all.
std::chrono::nanoseconds sleep_on(const std::vector<Link*>& links, int wake, int milliseconds);

}  // namespace sealring
