#include "mailbox/mailbox.hpp"

#include <pthread.h>

#include <algorithm>

#include "record/alert.hpp"

namespace sealring {
namespace {

// A thread that waits for a message moves the messages itself. The group's thread leaves it this much time to
// begin.
constexpr std::chrono::milliseconds kGrace{1};
// A thread that waits and does not move messages checks for signals this often.
constexpr std::chrono::milliseconds kLook{100};

}  // namespace

// Runs `work` with the device usable on the calling thread.
template <typename Work>
auto Mailbox::on_this_thread(Work work) {
  return with_device(device_ != nullptr, [&] {
    if (device_) device_->enter();
    return work();
  });
}

Mailbox::Mailbox(int rank, int world, const Context& context, size_t record_bytes,
                 uint64_t rekey_bytes, size_t gpu_record_bytes,
                 std::shared_ptr<FirstFailure> first_failure, Names names)
    : Endpoint(rank, world, context, std::max(record_bytes, kShortBytes), gpu_record_bytes,
               rekey_bytes, std::move(first_failure), std::move(names)),
      peers_(static_cast<size_t>(world)) {
  gpu_pool_.limit_to(most_buffers(static_cast<size_t>(world)));
}

Mailbox::~Mailbox() {
  close();
  if (mover_.joinable()) mover_.join();
}

void Mailbox::attached() {
  if (command_queue() == nullptr) return;
  mover_ = std::thread([this] { move_for_streams(); });
  mover_is_done_ = false;
  ::pthread_setname_np(mover_.native_handle(), "sealring mover");
}

// ---- what the caller sees ----------------------------------------------------------------------

// Ends the group if the lease is over. Called by a thread that does not drive.
void Mailbox::require_lease(Lock& lock) {
  if (!lease_) return;
  try {
    lease_->require(rank_, names());
  } catch (const Failure& failure) {
    failure_ = first_failure_->settle(failure);
    abandon_records();
    wait_for_driver(lock);
    throw end_with(failure);
  }
}

void Mailbox::place_late_links(std::vector<LateLink> links) {
  for (LateLink& late : links) place(std::move(late));
}

void Mailbox::attach(std::unique_ptr<Device> device) {
  require_process();
  {
    const Lock lock(lock_);
    place_late_links(late_.take());
  }
  Endpoint::attach(std::move(device));
}

void Mailbox::require_link(int peer) const {
  const bool exists = peer >= 0 && peer < world() && peer != rank_;
  if (!exists || (!links_[peer] && !expects_late_links_)) {
    throw std::invalid_argument("a message to or from a rank that is not there");
  }
}

std::shared_ptr<Completion> Mailbox::submit(const Message& message,
                                            const std::optional<CallerStream>& caller) {
  require_process();
  Lock lock(lock_);
  require_alive();
  require_lease(lock);
  if (late_.waiting()) place_late_links(late_.take());
  if (message.sends || message.peer != Message::kAnyone) require_link(message.peer);
  if (caller) require_device();
  const uint32_t number = caller ? number_for(lock, *caller) : 0;
  const auto completion = std::make_shared<Completion>(*this, Submitted{.number = number});
  UnderWay posted{message, completion, std::nullopt, Clock::now()};
  if (caller) {
    posted.ready = caller->ready;
    posted.reached = number == 0 && caller->ready == 0;
    on_device_[completion] = {message.memory, message.sends ? 0 : message.bytes};
  }
  under_way_.insert(completion);
  // The group's thread gives the caller time to call wait_on_host() only if the host waits.
  if (number == 0) posted_ = Clock::now();
  if (message.sends) {
    peers_[message.peer].unannounced.push_back(std::move(posted));
  } else {
    waiting_.push_back(std::move(posted));
    new_receives_ = true;
  }
  try {
    // A short message is sent before the call returns, if its link has room.
    if (!driving_ && (!message.sends || links_[message.peer]))
      on_this_thread(
          [&] { message.sends ? void(write(*links_[message.peer])) : match_arrivals(); });
  } catch (const Failure& failure) {
    throw end_with(failure);
  }
  wake();
  return completion;
}

void Mailbox::wait_on_host(Completion& message, const HostWait& how) {
  require_process();
  Lock lock(lock_);
  const auto over = [&] { return message.ended(); };
  while (!over()) {
    require_alive();
    if (driving_ && !drives_here()) {
      changed_.wait_for(lock, kLook);
      if (over()) break;
      lock.unlock();
      const bool leaves = how.signal_pending();
      lock.lock();
      if (leaves) throw Failure(FailureCode::closed, -1, "the script was interrupted");
    } else {
      drive(lock, over, how.signal_pending);
    }
  }
  message.reported = true;
  if (const std::optional<Failure> failure = message.error()) throw *failure;
}

std::vector<std::shared_ptr<Completion>> Mailbox::finished() {
  require_process();
  Lock lock(lock_);
  for (;;) {
    std::vector<CompletionRef> out;
    for (CompletionRef& message : std::exchange(news_, {})) {
      if (!std::exchange(message->reported, true)) out.push_back(std::move(message));
    }
    if (!out.empty()) return out;
    if (failure_) throw *failure_;
    if (closed_) return out;
    const Clock::time_point due = posted_ + kGrace;
    if (driving_ || kernel_runs() || !pending()) {
      changed_.wait(lock);
    } else if (Clock::now() < due) {
      changed_.wait_until(lock, due);
    } else {
      drive(lock, [this] { return !news_.empty() || !pending(); }, [] { return false; });
    }
  }
}

bool Mailbox::pending() const {
  const auto busy = [](const Peer& peer) {
    return !peer.unannounced.empty() || !peer.announced.empty() || !peer.accepted.empty() ||
           !peer.leaving.empty() || !peer.accepting.empty();
  };
  return !waiting_.empty() || !matched_.empty() || !records_.empty() ||
         std::any_of(peers_.begin(), peers_.end(), busy) ||
         std::any_of(links_.begin(), links_.end(),
                     [](const auto& link) { return link && !link->idle(); });
}

void Mailbox::done(const CompletionRef& message, int peer) {
  message->end(peer);
  under_way_.erase(message);
  if (on_device_.erase(message) != 0) {
    if (message->streams_wait()) command_queue()->release_waiters(message->submitted().number);
    stop_kernel_if_idle();
  }
  news_.push_back(message);
  changed_.notify_all();
}

void Mailbox::close() {
  if (!process_.here()) return;
  Lock lock(lock_);
  if (closed_ || failure_) return;
  closed_ = true;
  abandon_records();
  wait_for_driver(lock);
  place_late_links(late_.close({Kind::bye, {}}));
  send_last_records(links_, Kind::bye, {}, {});
  forget_all(Failure(FailureCode::closed, -1, "the group is closed"));
}

bool Mailbox::release_device(std::chrono::duration<double> patience) {
  if (!process_.here()) return true;
  Lock lock(lock_);
  if (!device_ || (!closed_ && !failure_)) return true;
  wait_for_driver(lock);
  streams_released_ = true;
  changed_.notify_all();
  const auto free = [this] { return mover_is_done_ && calling_ == 0; };
  if (!changed_.wait_for(lock, patience, free)) return false;
  gpu_pool_.clear();
  device_.reset();
  return true;
}

void Mailbox::fail(const Failure& failure) {
  if (!process_.here()) return;
  Lock lock(lock_);
  if (closed_ || failure_) return;
  failure_ = first_failure_->settle(failure);
  abandon_records();
  wait_for_driver(lock);
  end_with(failure);
}

// Only the thread that moves messages touches the links. It stops when it sees that the group has ended.
void Mailbox::wait_for_driver(Lock& lock) {
  wake();
  while (driving_ && !drives_here()) changed_.wait(lock);
}

const Failure& Mailbox::end_with(const Failure& failure) {
  failure_ = first_failure_->settle(failure);
  abandon_records();
  const LastWord word{Kind::alert, encode_alert(*failure_, rank_)};
  place_late_links(late_.close(word));
  send_last_records(links_, word.kind, word.payload, {});
  forget_all(*failure_);
  return *failure_;
}

void Mailbox::forget_all(const Failure& failure) {
  wipe();
  waiting_.clear();
  arrivals_.clear();
  matched_.clear();
  peers_.assign(peers_.size(), Peer{});
  for (const CompletionRef& message : under_way_) message->end(failure);
  under_way_.clear();
  wake();
}

void Mailbox::wake() {
  late_.ring();
  changed_.notify_all();
}

Mailbox::Stats Mailbox::stats() const {
  require_process();
  const Lock lock(lock_);
  Stats out = stats_;
  out.memory_bytes = memory_bytes();
  return out;
}

bool Mailbox::step() {
  return on_this_thread([this] {
    awaits_stream_ = false;
    if (late_.waiting()) place_late_links(late_.take());
    match_arrivals();
    bool moved = accept_matched();
    moved |= settle();
    for (const auto& link : links_) {
      if (!link) continue;
      moved |= read(*link);
      moved |= write(*link);
    }
    return moved;
  });
}

}  // namespace sealring
