// How the thread that moves messages waits when nothing can move, and how a message times out.
#include <unistd.h>

#include <chrono>
#include <string>

#include "mailbox/mailbox.hpp"

namespace sealring {
namespace {

// While messages move, the lease is checked only once in this many steps.
constexpr unsigned kStepsPerLook = 64;
// After this time without progress the device is polled less often: it takes longer than usual for a record,
// or a stream has not come to its call.
constexpr double kPollDeviceForS = 5e-3;

}  // namespace

void Mailbox::drive(Lock& lock, const std::function<bool()>& enough,
                    const std::function<bool()>& signal_pending) {
  const bool within = drives_here();
  driving_ = true;
  driver_ = std::this_thread::get_id();
  try {
    unsigned steps = 0;
    while (!failure_ && !closed_ && !enough()) {
      if (lease_ && steps++ % kStepsPerLook == 0) lease_->require(rank_, names());
      if (step()) {
        backoff_.progressed();
        continue;
      }
      const bool polls = waits_for_device();
      lock.unlock();
      bool lent = backoff_.yield_core();
      if (!lent && polls && backoff_.idle_s() < kPollDeviceForS)
        lent = ::usleep(kPollDeviceUs) == 0;
      const bool leaves = !lent && signal_pending();
      lock.lock();
      if (leaves) throw Failure(FailureCode::closed, -1, "the script was interrupted");
      if (lent || failure_ || closed_ || enough()) continue;
      // Handles what was submitted while the lock was open: sleep() clears the eventfd that announced it.
      if (step()) {
        backoff_.progressed();
      } else {
        sleep(lock);
      }
    }
  } catch (const Failure& failure) {
    driving_ = within;
    const Failure ends = failure_ ? *failure_ : closed_ ? failure : end_with(failure);
    changed_.notify_all();
    throw ends;
  } catch (...) {
    driving_ = within;
    changed_.notify_all();
    throw;
  }
  driving_ = within;
  changed_.notify_all();
}

void Mailbox::sleep(Lock& lock) {
  if (lease_) lease_->require(rank_, names());
  check_timeouts();
  std::vector<Link*> sleepers;
  for (const auto& link : links_) {
    if (link && !link->ended()) sleepers.push_back(link.get());
  }
  late_.hear();
  if (late_.waiting()) return;  // it came after the last step, and hear() has cleared its signal
  const int nap_ms = waits_for_device() ? kPollDeviceMs : kNapMs;
  lock.unlock();
  try {
    sleep_on(sleepers, late_.wake(), nap_ms);
  } catch (...) {
    lock.lock();
    throw;
  }
  lock.lock();
}

void Mailbox::check_timeouts() const {
  check_device_timeouts();
  const Clock::time_point now = Clock::now();
  const auto late = [&](const auto& message) {
    return std::chrono::duration<double>(now - message.moved).count() > message.timeout_s;
  };
  for (const UnderWay& each : waiting_) {
    if (late(each)) {
      throw peer_was_silent(each.peer, "no message with tag " + std::to_string(each.tag) + " came",
                            each.timeout_s);
    }
  }
  for (size_t peer = 0; peer < peers_.size(); ++peer) {
    const Peer& box = peers_[peer];
    const int rank = static_cast<int>(peer);
    for (const auto& [id, each] : box.accepting) {
      if (late(each)) throw peer_was_silent(rank, "nothing more of a message came", each.timeout_s);
    }
    for (const auto& [id, each] : box.announced) {
      if (late(each)) {
        throw peer_was_silent(
            rank, "the peer did not receive a message with tag " + std::to_string(each.tag),
            each.timeout_s);
      }
    }
    for (const auto* queue : {&box.unannounced, &box.accepted, &box.leaving}) {
      for (const UnderWay& each : *queue) {
        if (late(each)) throw peer_was_silent(rank, "the peer takes nothing", each.timeout_s);
      }
    }
  }
}

// No peer is to blame if this rank's device hangs, or if a stream does not come to the call.
void Mailbox::check_device_timeouts() const {
  const Clock::time_point now = Clock::now();
  const auto require_in_time = [&](const auto& each) {
    if (std::chrono::duration<double>(now - each.moved).count() <= each.timeout_s) return;
    throw peer_was_silent(rank_,
                          "the GPU of " + names().rank(rank_) + " did not do its part of a message",
                          each.timeout_s);
  };
  if (!records_.empty()) require_in_time(records_.oldest());
  for (const Match& each : matched_) require_in_time(each.incoming);
  for (const Peer& box : peers_) {
    for (const UnderWay& each : box.accepted) {
      if (each.ready && !each.reached) require_in_time(each);
    }
  }
}

}  // namespace sealring
