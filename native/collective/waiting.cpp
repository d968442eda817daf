// Checks that all ranks are in the same collective, and waits for the others. A waiting rank sends its
// status, reads the others' status, and at the timeout names the rank that did not come.
#include <unistd.h>

#include <algorithm>
#include <string>

#include "collective/collective.hpp"
#include "collective/stopwatch.hpp"

namespace sealring {
namespace {

// A rank that has waited this long tells the others which collective it is in.
constexpr double kStatusAfterS = 0.5;

// It repeats its status this many times within the timeout. A peer's status is believed for half the timeout,
// because the peer may have been stopped since.
constexpr double kStatusesInPatience = 8;
constexpr double kStatusHolds = 0.5;

// A rank without a link to every other rank may not see which one is late. It waits this much longer, so that
// a rank that does see it can report it first.
constexpr double kWitnessS = 2.0;

double seconds(Clock::duration passed) { return std::chrono::duration<double>(passed).count(); }

}  // namespace

// ---- in step -----------------------------------------------------------------------------------

bool Collective::same_call(const Header& header, uint64_t total) const {
  return header.collective == call_.number && header.operation == program_.operation &&
         header.algorithm == program_.algorithm && header.root == call_.root &&
         header.total == total && header.dtype == static_cast<uint8_t>(call_.dtype) &&
         header.reduction == static_cast<uint8_t>(call_.reduction);
}

void Collective::require_same(const Link& link) const {
  const Header& header = link.header();
  const int origin = header.kind == Kind::group ? static_cast<int>(header.sender) : -1;
  const int index = program_.receiving_step(link.peer, origin, header.message);
  const uint64_t total =
      index < 0 ? call_.total.value_or(header.total) : total_of(program_.steps[index].slot);
  if (same_call(header, total)) return;
  View mine = view();
  mine.total = total;
  disagree(link.peer, static_cast<int>(header.sender), View::from(header), mine);
}

void Collective::disagree(int peer, int other, const View& theirs, const View& mine) const {
  throw ranks_disagree(peer, names().rank(other) + " is in " + names().view(theirs) + ", " +
                                 names().rank(keyring_.rank) + " is in " + names().view(mine) +
                                 names().remark({theirs.operation, mine.operation}));
}

View Collective::view() const { return view_of(call_); }

View view_of(const Call& call) {
  return {call.number,
          call.program->operation,
          call.program->algorithm,
          static_cast<uint8_t>(call.dtype),
          static_cast<uint8_t>(call.reduction),
          call.root,
          call.total.value_or(0)};
}

// A waiting peer says which collective it is in. It may be behind or ahead of us and still agree with us: its
// call is compared with our call of the same number.
void Collective::on_status(Link& link) {
  link.open(link.arrived_payload());
  const View theirs = View::from(link.header());
  link.waits_in = theirs.number;
  link.said_waiting = Clock::now();
  const auto ours = std::find_if(history_.begin(), history_.end(),
                                 [&](const View& view) { return view.number == theirs.number; });
  if (ours != history_.end() && *ours != theirs) {
    disagree(link.peer, link.peer, theirs, *ours);
  }
  link.take();
}

void Collective::send_status() {
  const Clock::time_point now = Clock::now();
  const bool again = status_sent_.has_value();
  if (again && seconds(now - *status_sent_) < call_.timeout_s / kStatusesInPatience) return;
  status_sent_ = now;
  for (const auto& link : links_) {
    if (!link || link->ended() || link->broken() || !reads_here(link->peer)) continue;
    if (again && !link->idle()) continue;  // the peer takes nothing, and records would pile up
    Header header;
    view().put_into(header);
    header.kind = Kind::status;
    link->send(header, nullptr);
    link->flush();  // flushed here, so that it does not count as progress and restart the timeout
  }
}

// ---- waiting -----------------------------------------------------------------------------------

void Collective::wait() {
  {
    const Stopwatch waiting(stats_.wait_ns);
    if (backoff_.yield_core()) return;
  }
  if (call_.signal_pending()) throw Failure(FailureCode::closed, -1, "the script was interrupted");
  check_interrupt();  // after that: the handler of a signal may have closed the group
  const bool full = device_ != nullptr && !device_->has_room();
  if ((!device_is_busy() && !full) || backoff_.idle_s() > kStatusAfterS) return sleep();
  const Stopwatch waiting(stats_.wait_ns);
  ::usleep(kPollDeviceUs);
}

// An interrupt between two collectives counts too: its caller expects the group to be closed.
void Collective::check_interrupt() const {
  if (interrupted_) throw Failure(FailureCode::closed, -1, "the group was closed meanwhile");
  require_lease();
}

void Collective::require_lease() const {
  if (lease_ != nullptr) lease_->require(keyring_.rank, names());
}

void Collective::sleep() {
  const double silent = backoff_.idle_s();
  const double patience = call_.timeout_s + (sees_who_is_late() ? 0.0 : kWitnessS);
  if (silent > patience) throw_timeout();
  if (silent > kStatusAfterS) send_status();
  std::vector<Link*> sleepers;
  for (const auto& link : links_) {
    if (link && !link->ended()) sleepers.push_back(link.get());
  }
  const double left_ms = (patience - silent) * 1e3;
  const int longest_ms = device_is_busy() ? kPollDeviceMs : kNapMs;
  const int nap_ms = static_cast<int>(std::clamp<double>(left_ms + 1, 1, longest_ms));
  std::chrono::nanoseconds slept{0};
  {
    const Stopwatch waiting(stats_.wait_ns);
    slept = sleep_on(sleepers, latecomers_.links.wake(), nap_ms);
  }
  if (slept.count() != 0) ++stats_.sleeps;
  for (Link* link : sleepers) {
    if (expected_[link->peer] != 0 && !link->ready()) link->waited_ns += slept.count();
  }
  // Alerts and ends come over any link, not only those that the program reads.
  for (Link* link : sleepers) {
    if (receive(*link)) backoff_.progressed();
  }
}

// Whether throw_timeout() could name a rank that has not come to this collective.
bool Collective::sees_who_is_late() const {
  for (size_t peer = 0; peer < links_.size(); ++peer) {
    if (expected_[peer] == 0) continue;
    if (!links_[peer]) return true;
    if (!links_[peer]->ready() && links_[peer]->waits_in < call_.number) return true;
  }
  const auto there = [](const auto& link) { return link != nullptr; };
  const auto count = std::count_if(links_.begin(), links_.end(), there);
  return static_cast<size_t>(count) + 1 == links_.size();
}

// Names the peer that this rank waits for, or the rank that this peer waits for in turn. A peer that waits in
// this collective has sent its status, and is not named.
void Collective::throw_timeout() {
  const Clock::time_point now = Clock::now();
  int blamed = -1;
  const auto blame = [&](auto guilty) {
    for (const auto& link : links_) {
      if (blamed < 0 && link && guilty(*link)) blamed = link->peer;
    }
  };
  const auto owes = [&](const Link& link) { return expected_[link.peer] != 0 && !link.ready(); };
  const auto waits = [&](const Link& link) { return link.waits_in >= call_.number; };
  const auto waits_still = [&](const Link& link) {
    return waits(link) && seconds(now - link.said_waiting) < call_.timeout_s * kStatusHolds;
  };
  const char* what = "the peer did not connect";
  for (const Step& step : program_.steps) {
    for (int peer : step.peers) {
      if (blamed < 0 && !links_[peer]) blamed = peer;
    }
  }
  if (blamed < 0) what = "nothing came from the peer";
  blame([&](const Link& link) { return owes(link) && !waits(link); });
  if (blamed < 0 &&
      std::any_of(
          links_.begin(), links_.end(), [&](const auto& link) { return link && owes(*link); })) {
    what = "the peer did not come to this collective";
    blame([&](const Link& link) { return !waits(link); });
    if (blamed < 0) what = "nothing came from the peer";
    blame([&](const Link& link) { return owes(link) && !waits_still(link); });
    blame([&](const Link& link) { return !waits_still(link); });
    blame(owes);
  }
  if (blamed < 0) {
    what = "the peer takes nothing";
    blame([this](const Link& link) {
      return !link.idle() || (wires_ != nullptr && wires_->lent_to(link.peer));
    });
  }
  if (blamed < 0 && !on_device_.empty() && on_device_.oldest().sender >= 0) {
    what = "a record of the peer's did not come to this rank's GPU";
    blamed = on_device_.oldest().sender;
  }
  if (blamed < 0 && exchanging_) {
    const std::vector<int> peers = exchanging_->awaited_peers();
    const auto guilty =
        std::find_if(peers.begin(), peers.end(), [&](int peer) { return !waits(*links_[peer]); });
    what = "an exchange with the peer's GPU is not over";
    if (!peers.empty()) blamed = guilty != peers.end() ? *guilty : peers.front();
  }
  throw peer_was_silent(blamed, what, call_.timeout_s);
}

}  // namespace sealring
