#include "collective/engine.hpp"

#include <algorithm>
#include <chrono>
#include <set>
#include <string>

#include "device/sealing_on_device.hpp"
#include "record/alert.hpp"
#include "transport/farewell.hpp"

namespace sealring {
namespace {

// More collectives than ranks can be apart, because a link holds only a few records.
constexpr size_t kHistory = 256;

// The most commands launched ahead for one collective. A collective that needs more runs while its caller
// waits.
constexpr uint64_t kMostCommands = 1u << 16;
// Upper limits of the buffers in use at once: by the device, by a link, and by a link that forwards.
constexpr size_t kInHand = 40, kLink = 16, kForwardingLink = 48;

}  // namespace

Engine::Engine(int rank, int world, const Context& context, const KeyBytes& group_key,
               size_t record_bytes, uint64_t rekey_bytes,
               std::shared_ptr<FirstFailure> first_failure, Names names)
    : Endpoint(rank, world, context, record_bytes, kGpuPayload, rekey_bytes,
               std::move(first_failure), std::move(names)) {
  keyring_.own_group = std::make_unique<SealingKey>(group_key, rekey_bytes);
  keyring_.own_group_gpu =
      std::make_unique<SealingKey>(gpu_key(group_key), rekey_bytes, Suite::chacha20_poly1305);
  keyring_.groups.resize(static_cast<size_t>(world));
  keyring_.groups_gpu.resize(static_cast<size_t>(world));
  keyring_.lanes_keys.resize(static_cast<size_t>(world));
  keyring_.lanes_keys[rank] = lanes_key(group_key);
  update_account();
}

Engine::~Engine() { close(); }

void Engine::place_late_links(std::vector<LateLink> links) {
  for (LateLink& late : links) {
    if (keyring_.groups[late.peer]) place(std::move(late));  // else the peer is no member
  }
}

void Engine::attach(std::unique_ptr<Device> device) {
  const std::lock_guard<RunLock> lock(running_);
  place_late_links(late_.take());
  Endpoint::attach(std::move(device));
}

void Engine::put_late_keys() {
  require_process();
  const std::lock_guard<RunLock> lock(running_);
  require_alive();
  require_device();
  place_late_links(late_.take());
  device_->enter();
  for (const auto& link : links_) {
    if (!link) continue;
    slot_of(*device_, link->gpu_send_key());
    slot_of(*device_, link->gpu_receive_key());
  }
}

namespace {

struct SubmittedCall final : Completion {
  SubmittedCall(Endpoint& owner, Call call)
      : Completion(owner, call.submitted), call(std::move(call)) {}
  Call call;
};

}  // namespace

std::shared_ptr<Completion> Engine::submit(Call call, const std::optional<CallerStream>& caller) {
  require_process();
  call.on_device = caller.has_value();
  call.ready = caller ? caller->ready : 0;
  if (caller && caller->streams_wait) call.submitted = submit_to_device(call, caller->stream);
  return std::make_shared<SubmittedCall>(*this, std::move(call));
}

void Engine::wait_on_host(Completion& collective, const HostWait& how) {
  Call& call = static_cast<SubmittedCall&>(collective).call;
  call.number = how.number;
  call.timeout_s = how.timeout_s;
  call.signal_pending = how.signal_pending;
  try {
    run(call);
  } catch (const Failure& failure) {
    collective.end(failure);
    throw;
  }
  collective.end(-1);
}

void Engine::launch_rest() {
  require_process();
  if (device_) device_->launch_rest();
}

void Engine::mark_end(const Completion& collective) {
  require_process();
  if (CommandQueue* const queue = command_queue()) queue->mark_end(collective.submitted().number);
}

// Does not take `running_`: another collective's run may hold it while it waits for its peers.
Submitted Engine::submit_to_device(const Call& call, uint64_t stream) {
  require_device();
  const Cut cut = cut_of(call);
  const uint64_t commands = std::max<uint64_t>(1, cut.steps + most_replaced_keys(cut));
  if (commands > kMostCommands) return {};
  if (!call.wired || wires_->mixed) {
    const auto forwards = [](const Step& step) { return step.action == Action::forward; };
    const std::vector<Step>& steps = call.program->steps;
    const size_t on_a_link =
        std::any_of(steps.begin(), steps.end(), forwards) ? kForwardingLink : kLink;
    std::set<int> peers;
    for (const Step& step : steps) peers.insert(step.peers.begin(), step.peers.end());
    device_->reserve_pinned_memory(gpu_pool_.slab_bytes(), kInHand + on_a_link * peers.size());
  }
  std::vector<ExchangeRound> rounds;
  if (call.wired && wires_->exchanges()) rounds = Rounds(cut, *wires_).all(commands - cut.steps);
  return device_->submit({stream, call.dtype, call.reduction, call.segment_bytes,
                          cut.scratch_bytes(), static_cast<uint32_t>(commands),
                          static_cast<uint32_t>(cut.results().size()), std::move(rounds)});
}

// A key is replaced after each `rekey_bytes_` that it seals (less the last piece before that), and once more
// for what it sealed before this call. Returns 0 until the group has moved that many bytes in all.
uint64_t Engine::most_replaced_keys(const Cut& cut) {
  uint64_t bytes = cut.steps * records_in_run(cut.segment_bytes) * kTagBytes;
  // Each is (sealing rank, receiving rank), or (sealing rank, -1) for a group key.
  std::set<std::pair<int, int>> keys;
  for (const Step& step : cut.program.steps) {
    bytes += cut.slot_bytes(step.slot);
    if (step.action == Action::send) keys.emplace(rank_, step.peers[0]);
    if (step.action == Action::publish) keys.emplace(rank_, -1);
    if (!receives(step.action)) continue;
    const bool alone = step.origin < 0;
    keys.emplace(alone ? step.peers[0] : step.origin, alone ? rank_ : -1);
  }
  const uint64_t piece = sealed_run_bytes(cut.segment_bytes);
  if ((device_bytes_ += bytes) + piece < rekey_bytes_) return 0;
  if (rekey_bytes_ <= 2 * piece) return cut.steps;
  return std::min<uint64_t>(cut.steps, keys.size() * (1 + bytes / (rekey_bytes_ - piece)));
}

void Engine::release_streams(const Completion& collective) {
  require_process();
  const std::lock_guard<RunLock> lock(running_);
  if (!collective.streams_wait() || !device_) return;
  // fail() also wipes the keys on the device, so the group must have ended.
  if (!failure_ && !closed_) {
    Failure ends = first_failure_->settle(Failure(
        FailureCode::closed, -1, "a collective on " + names().rank(rank_) + " was not run"));
    end_with(ends, {});
  }
  const Call& call = static_cast<const SubmittedCall&>(collective).call;
  command_queue()->fail(call.submitted, cut_of(call).results());
}

void Engine::run(const Call& call) {
  require_process();
  if (running_.held_here()) {
    throw std::logic_error("the handler of a signal cannot run a collective within another one");
  }
  const std::lock_guard<RunLock> lock(running_);
  if (late_.waiting()) place_late_links(late_.take());
  require_possible(call);
  if (call.on_device && call.submitted.number == 0) {
    most_replaced_keys(cut_of(call));
  }
  history_.push_back(view_of(call));
  if (history_.size() > kHistory) history_.pop_front();
  try {
    run_collective(call);
  } catch (Failure& failure) {
    // A message's failure that another rank reports belongs to none of our collectives.
    if (failure.collective == 0 && failure.reported_by < 0) failure.collective = call.number;
    say_where_last_seen(failure);
    Failure ends = first_failure_->settle(failure);
    end_with(ends, view_of(call));
    throw ends;
  }
  update_account();
}

void Engine::require_possible(const Call& call) {
  require_alive();
  const Program& program = *call.program;
  if (program.rank != rank_ || static_cast<size_t>(program.world) != links_.size()) {
    throw std::invalid_argument("the program is for another rank or world");
  }
  if (call.slots.size() != static_cast<size_t>(program.slots)) {
    throw std::invalid_argument("the program needs another number of slots");
  }
  require_lanes(call);
  if (call.on_device) require_device();
  if (call.wired && (!call.on_device || !wired())) {
    throw std::invalid_argument("there are no wires in use");
  }
  const size_t largest = call.wired ? wires_->largest_segment() : pool_of(call).payload_bytes();
  if (call.segment_bytes == 0 || call.segment_bytes > largest || call.segment_bytes % 16 != 0) {
    throw std::invalid_argument("a segment must be a multiple of 16 bytes and fit into a record");
  }
  for (const Step& step : program.steps) {
    for (int peer : step.peers) {
      if (!links_[peer] && (call.on_device || !keyring_.groups[peer])) {
        throw std::invalid_argument("the program needs a link that is not there");
      }
      if (call.on_device && links_[peer]->gpu_receive_key().on_device.slot < 0) {
        throw std::invalid_argument("the program needs a link whose keys the device has not");
      }
    }
    const bool reduces = step.action == Action::reduce || step.action == Action::receive_reduce;
    if (reduces && reduce_function(call.dtype, call.reduction) == nullptr) {
      throw std::invalid_argument("this dtype has no such reduction");
    }
  }
}

void Engine::run_collective(const Call& call) {
  const size_t lanes = Cut::lanes_used(call);
  if (lanes > 1) return run_lanes(call, lanes);
  with_device(call.on_device, [&] { run_lane(call); });
}

void Engine::run_on(const Call& call, Links& links, Keyring& keyring, BufferPool& pool,
                    Stats& stats, Backoff& backoff, LateLinks& late) {
  Device* const device = call.on_device ? device_.get() : nullptr;
  Wires* const wires = call.wired ? wires_.get() : nullptr;
  const Collective::Latecomers latecomers{
      late, [this](std::vector<LateLink> came) { place_late_links(std::move(came)); }};
  Collective(call, links, keyring, pool, device, wires, stats, backoff, history_, interrupted_,
             lease_.get(), latecomers)
      .run();
}

void Engine::fail(const Failure& failure) {
  if (!process_.here()) return;
  // Settled before the interruption, so that a run under way ends with this failure.
  Failure ends = first_failure_->settle(failure);
  interrupted_ = true;
  if (running_.held_here()) return;  // the run ends the group when the handler has returned
  const std::lock_guard<RunLock> lock(running_);
  if (closed_ || failure_) return;
  end_with(ends, {});
}

// If a peer is lost or silent, adds to the failure where the peer was last seen.
void Engine::say_where_last_seen(Failure& failure) const {
  const bool absent =
      failure.code == FailureCode::peer_lost || failure.code == FailureCode::peer_silent;
  if (!absent || failure.reported_by >= 0 || failure.peer < 0 || !links_[failure.peer]) return;
  const View& seen = links_[failure.peer]->seen;
  Failure said(
      failure.code, failure.peer,
      failure.what() + std::string("; ") + names().rank(failure.peer) + " was last seen " +
          (seen.number == 0 ? "before its first collective"
                            : "in " + names().view(seen) + names().remark({seen.operation})));
  said.collective = failure.collective;
  failure = said;
}

void Engine::end_with(Failure& failure, const View& view) {
  const LastWord word{Kind::alert, encode_alert(failure, rank_)};
  place_late_links(late_.close(word));  // tells the peers of late links as well
  send_last_records(all_links(), word.kind, word.payload, view);
  if (failure.code == FailureCode::out_of_step) {
    if (view.number != 0) failure.views[rank_] = names().rank(rank_) + ": " + names().view(view);
    collect_views(links_, names(), failure);
  }
  failure_ = failure;
  update_account();  // before the links, which hold the waiting times, are wiped
  wipe_all();
  update_account();
}

void Engine::close() {
  if (!process_.here()) return;
  interrupted_ = true;
  if (running_.held_here()) return;  // the run ends the group when the handler has returned
  const std::lock_guard<RunLock> lock(running_);
  if (closed_ || failure_) return;
  closed_ = true;
  place_late_links(late_.close({Kind::bye, {}}));
  send_last_records(all_links(), Kind::bye, {}, {});
  wipe_all();
}

bool Engine::release_device(std::chrono::duration<double> patience) {
  if (!process_.here()) return true;
  if (running_.held_here()) return false;
  const std::lock_guard<RunLock> running(running_);
  Lock lock(lock_);
  if (!device_ || (!closed_ && !failure_)) return true;
  if (command_queue() != nullptr && command_queue()->busy()) return false;
  if (!changed_.wait_for(lock, patience, [this] { return calling_ == 0; })) return false;
  wires_.reset();
  gpu_pool_.clear();
  const std::vector<MappedFile> mapped =
      std::exchange(mapped_, {});  // kept until the device is gone, which has it registered
  std::unique_ptr<Device> device = std::move(device_);
  // CUDA may wait until the GPU is idle. Threads that ask for a completion must not wait for that.
  lock.unlock();
  device.reset();
  return true;
}

void Engine::update_account() {
  const std::lock_guard<std::mutex> lock(account_lock_);
  account_.stats = stats_;
  account_.waited_s.resize(links_.size(), 0.0);
  account_.rekeys.resize(links_.size(), 0);
  if (keyring_.own_group) account_.rekeys[rank_] = keyring_.own_group->rekeys();
  account_.memory_bytes = memory_bytes() + stats_.scratch_bytes;
  if (wires_) account_.memory_bytes += wires_->memory_bytes();
  for (size_t peer = 0; peer < links_.size(); ++peer) {
    if (!links_[peer]) continue;
    account_.waited_s[peer] = static_cast<double>(links_[peer]->waited_ns) * 1e-9;
    account_.rekeys[peer] = links_[peer]->rekeys();
  }
  for (const auto& lane : lanes_) add_account_of(*lane);
}

Engine::Account Engine::account() const {
  require_process();
  const std::lock_guard<std::mutex> lock(account_lock_);
  return account_;
}

std::pair<uint64_t, uint64_t> Engine::sealed_and_opened() const {
  require_process();
  const std::lock_guard<std::mutex> lock(account_lock_);
  return {account_.stats.sealed_bytes, account_.stats.opened_bytes};
}

}  // namespace sealring
