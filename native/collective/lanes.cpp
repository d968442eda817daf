#include "collective/lanes.hpp"

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>

#include "collective/engine.hpp"

namespace sealring {
namespace {

// Further lanes time out this much later than lane 0. So lane 0 names the silent rank, unless lane 0 is done.
constexpr double kFirstLaneSpeaksS = 0.5;
constexpr std::chrono::milliseconds kLookForSignals{50};

}  // namespace

Lane::Lane(const Keyring& first, size_t number, size_t payload_bytes, uint64_t rekey_bytes)
    : pool(payload_bytes),
      keyring{.rank = first.rank,
              .context = first.context,
              .own_group = nullptr,
              .groups = {},
              .names = first.names,
              .commitments = first.commitments,
              .lane = cpu_lane(number)},
      links(first.groups.size()) {
  keyring.own_group = std::make_unique<SealingKey>(
      lane_key(first.lanes_keys[first.rank].value(), keyring.lane), rekey_bytes);
  keyring.groups.resize(first.groups.size());
  for (size_t member = 0; member < first.groups.size(); ++member) {
    if (!first.groups[member]) continue;
    keyring.groups[member] =
        std::make_unique<OpeningKey>(lane_key(first.lanes_keys[member].value(), keyring.lane));
  }
}

void Lane::add(const Link& first, std::unique_ptr<Pipe> pipe, uint64_t rekey_bytes) {
  links[first.peer] =
      std::make_unique<Link>(first.peer, std::move(pipe), first.lane_send_key(keyring.lane),
                             first.lane_receive_key(keyring.lane), rekey_bytes, keyring, pool);
}

void Lane::wipe() {
  for (auto& link : links) link.reset();
  for (auto& key : keyring.groups) key.reset();
  keyring.own_group.reset();
}

size_t Lane::memory_bytes() const {
  size_t bytes = pool.bytes() + stats.scratch_bytes;
  for (const auto& link : links) {
    if (link) bytes += link->memory_bytes();
  }
  return bytes;
}

Stats operator+(const Stats& one, const Stats& other) {
  return {.sealed_bytes = one.sealed_bytes + other.sealed_bytes,
          .opened_bytes = one.opened_bytes + other.opened_bytes,
          .sealed_records = one.sealed_records + other.sealed_records,
          .opened_records = one.opened_records + other.opened_records,
          .forwarded_records = one.forwarded_records + other.forwarded_records,
          .sleeps = one.sleeps + other.sleeps,
          .scratch_bytes = one.scratch_bytes + other.scratch_bytes,
          .run_ns = one.run_ns + other.run_ns,
          .seal_ns = one.seal_ns + other.seal_ns,
          .open_ns = one.open_ns + other.open_ns,
          .reduce_ns = one.reduce_ns + other.reduce_ns,
          .wait_ns = one.wait_ns + other.wait_ns};
}

// ---- the engine's lanes ------------------------------------------------------------------------

void Engine::add_lane_link(size_t lane, int peer, std::unique_ptr<Pipe> pipe) {
  require_process();
  const std::lock_guard<RunLock> lock(running_);
  require_alive();
  if (late_.waiting()) place_late_links(late_.take());
  if (peer < 0 || peer >= world() || lane == 0 || lane >= kMaxLanes || lane > lanes_.size() + 1) {
    throw std::invalid_argument("a lane without those before it, or to a rank that is not there");
  }
  // A lane's keys are used for one lane, once.
  const bool made = lane <= lanes_.size();
  if (!links_[peer] || !links_[peer]->has_lanes_keys() || (!made && !keyring_.lanes_keys[rank_])) {
    throw std::invalid_argument("a lane needs the first one, and keys that were not forgotten");
  }
  if (!made) {
    lanes_.push_back(std::make_unique<Lane>(keyring_, lane, pool_.payload_bytes(), rekey_bytes_));
  }
  Lane& into = *lanes_[lane - 1];
  if (into.links[peer]) throw std::invalid_argument("a lane has a link to this rank already");
  if (!into.keyring.own_group) throw std::invalid_argument("the lane was dropped");
  into.add(*links_[peer], std::move(pipe), rekey_bytes_);
}

void Engine::complete_lanes(const std::vector<int>& peers) {
  require_process();
  const std::lock_guard<RunLock> lock(running_);
  forget_lanes_keys(peers);
}

void Engine::drop_lanes(const std::vector<int>& peers) {
  require_process();
  const std::lock_guard<RunLock> lock(running_);
  for (auto& lane : lanes_) {
    for (const int peer : peers) lane->links.at(peer).reset();
    if (links_in(lane->links).empty()) lane->wipe();
  }
  forget_lanes_keys(peers);
}

// The members' lane keys are derived for all lanes there will be; a link's keys serve only the lanes of its
// pair.
void Engine::forget_lanes_keys(const std::vector<int>& peers) {
  for (auto& key : keyring_.lanes_keys) key.reset();
  for (const int peer : peers) {
    if (links_.at(peer)) links_[peer]->forget_lanes_keys();
  }
}

void Engine::wipe_all() {
  for (auto& lane : lanes_) lane->wipe();
  wipe();
}

void Engine::add_account_of(const Lane& lane) {
  account_.stats = account_.stats + lane.stats;
  account_.memory_bytes += lane.memory_bytes();
  if (lane.keyring.own_group) account_.rekeys[rank_] += lane.keyring.own_group->rekeys();
  for (const Link* link : links_in(lane.links)) {
    // Lanes wait at the same time, so only the longest wait counts.
    double& waited_s = account_.waited_s[link->peer];
    waited_s = std::max(waited_s, static_cast<double>(link->waited_ns) * 1e-9);
    account_.rekeys[link->peer] += link->rekeys();
  }
}

std::vector<Link*> Engine::all_links() const {
  std::vector<Link*> links = links_in(links_);
  for (const auto& lane : lanes_) {
    const std::vector<Link*> more = links_in(lane->links);
    links.insert(links.end(), more.begin(), more.end());
  }
  return links;
}

void Engine::require_lanes(const Call& call) const {
  if (call.lanes == 0 || call.lane != 0 || call.lanes > lanes_.size() + 1 ||
      (call.lanes > 1 && call.on_device)) {
    throw std::invalid_argument("the call needs lanes that are not there");
  }
  for (size_t lane = 1; lane < call.lanes; ++lane) {
    for (const Step& step : call.program->steps) {
      for (int peer : step.peers) {
        if (!lanes_[lane - 1]->links[peer])
          throw std::invalid_argument("the program needs a link that a lane has not");
      }
    }
  }
}

void Engine::run_lane(const Call& call) {
  if (call.lane == 0) return run_on(call, links_, keyring_, pool_of(call), stats_, backoff_, late_);
  Lane& lane = *lanes_[call.lane - 1];
  run_on(call, lane.links, lane.keyring, lane.pool, lane.stats, lane.backoff, lane.no_late_links);
}

// Lanes begin in the order of their numbers. Lanes for which no thread could be made run on this thread, one
// after the other. So the first lane that is not done on all ranks has begun on all of them, and can go on.
void Engine::run_lanes(const Call& call, size_t used) {
  std::mutex mutex;
  std::condition_variable changed;
  std::exception_ptr first;
  size_t running = 0;
  // The first failure ends all lanes and is reported. Later failures are only its consequences.
  const auto ends_with = [&](const std::exception_ptr& why) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (!first) first = why;
    interrupted_ = true;
  };
  const auto run = [&](size_t number) {
    Call part = call;
    part.lane = number;
    if (number != 0) {
      part.signal_pending = [] { return false; };  // only the caller's thread asks
      part.timeout_s += kFirstLaneSpeaksS;
    }
    try {
      run_lane(part);
    } catch (const Failure&) {
      ends_with(std::current_exception());
    } catch (const ForkedProcess&) {
      if (process_.here()) ends_with(std::current_exception());
    } catch (const std::exception& broken) {
      ends_with(std::make_exception_ptr(
          Failure(FailureCode::closed, -1,
                  "a thread of " + names().rank(rank_) + " failed: " + broken.what())));
    }
  };
  auto threads = std::make_unique<std::vector<std::thread>>();
  threads->reserve(used);
  size_t next = 1;
  for (; next < used; ++next) {
    try {
      const std::lock_guard<std::mutex> lock(mutex);
      threads->emplace_back([&, number = next] {
        run(number);
        const std::lock_guard<std::mutex> lock(mutex);
        --running;
        changed.notify_one();
      });
      ++running;
    } catch (const std::system_error&) {
      break;  // no more threads are allowed here
    }
  }
  run(0);
  for (; next < used && process_.here(); ++next) run(next);
  if (!process_.here()) {
    [[maybe_unused]] const auto* left =
        threads.release();  // a signal handler forked: the child has none of these threads
    process_.require("this process group");
  }
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(mutex);
      if (changed.wait_for(lock, kLookForSignals, [&] { return running == 0; })) break;
    }
    if (call.signal_pending()) {
      ends_with(
          std::make_exception_ptr(Failure(FailureCode::closed, -1, "the script was interrupted")));
    } else if (interrupted_) {  // by a signal handler
      ends_with(std::make_exception_ptr(
          Failure(FailureCode::closed, -1, "the group was closed meanwhile")));
    }
    if (!process_.here()) {
      [[maybe_unused]] const auto* left = threads.release();
      process_.require("this process group");
    }
  }
  for (std::thread& thread : *threads) thread.join();
  if (first) std::rethrow_exception(first);
}

}  // namespace sealring
