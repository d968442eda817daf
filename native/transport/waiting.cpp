#include "transport/waiting.hpp"

#include <poll.h>
#include <sched.h>

namespace sealring {
namespace {

constexpr std::chrono::microseconds kPatience{200};
// A yield that takes longer than this means that another program uses the core: a peer would return it
// sooner.
constexpr std::chrono::microseconds kStrangersTurn{2500};
constexpr std::chrono::milliseconds kCrowdedFor{20};

}  // namespace

bool Backoff::yield_core() {
  const Clock::time_point now = Clock::now();
  if (progressing_) {
    progressing_ = false;
    last_progress_ = now;
  }
  if (now - last_progress_ >= kPatience || now < crowded_until_) return false;
  sched_yield();
  const Clock::time_point after = Clock::now();
  if (after - now > kStrangersTurn) crowded_until_ = after + kCrowdedFor;
  return true;
}

double Backoff::idle_s() const {
  return std::chrono::duration<double>(Clock::now() - last_progress_).count();
}

std::chrono::nanoseconds sleep_on(const std::vector<Link*>& links, int wake, int milliseconds) {
  std::vector<pollfd> polled;
  bool quiet = true;
  for (Link* link : links) {
    quiet &= link->arm();
    polled.push_back({link->socket(), link->poll_events(), 0});
  }
  if (wake >= 0) polled.push_back({wake, POLLIN, 0});
  std::chrono::nanoseconds slept{0};
  if (quiet) {
    const Clock::time_point before = Clock::now();
    ::poll(polled.data(), polled.size(), milliseconds);
    slept = Clock::now() - before;
  }
  for (Link* link : links) link->disarm();
  return slept;
}

}  // namespace sealring
