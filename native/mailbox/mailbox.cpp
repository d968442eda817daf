#include "mailbox/mailbox.hpp"

#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "record/alert.hpp"
#include "transport/inherited_sockets.hpp"
#include "device/cuda/persistent_kernel.hpp"
#include "device/sealing_on_device.hpp"

namespace sealring {
namespace {

// A thread that calls wait() moves the messages itself; the group's thread waits this long for one.
constexpr std::chrono::milliseconds kGrace{1};
// A thread that waits and does not move messages checks for signals this often.
constexpr std::chrono::milliseconds kLook{100};

}  // namespace

// The calling thread may use the device in `work`. If the device fails the peers must be told, for
// they wait for this rank.
template <typename Work>
auto Mailbox::with_device(Work work) {
  if (!device_) return work();
  try {
    device_->enter();
    return work();
  } catch (const Failure&) {
    throw;
  } catch (const ForkedProcess&) {
    throw;  // the parent's messages go on
  } catch (const std::exception& broken) {
    throw Failure(FailureCode::closed, -1,
                  "the GPU of " + names().rank(rank_) + " failed: " + broken.what());
  }
}

Mailbox::Mailbox(int rank, int world, const Context& context, size_t record_bytes,
                 uint64_t rekey_bytes, size_t gpu_record_bytes,
                 std::shared_ptr<FirstFailure> first_failure, Names names)
    : rank_(rank),
      rekey_bytes_(rekey_bytes),
      first_failure_(std::move(first_failure)),
      wake_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
      pool_(std::max(record_bytes, std::max(kShortBytes, kMaxAlertText + 64))),
      gpu_pool_(gpu_record_bytes),
      keyring_{rank, context, nullptr, {}, nullptr, {}, &gpu_pool_, 0, std::move(names)},
      links_(static_cast<size_t>(world)),
      peers_(static_cast<size_t>(world)) {
  if (wake_ < 0) throw std::runtime_error(std::string("eventfd: ") + std::strerror(errno));
}

Mailbox::~Mailbox() {
  close();
  if (mover_.joinable()) mover_.join();
  ::close(wake_);
}

void Mailbox::add_link(int peer, std::unique_ptr<Pipe> pipe, const KeyBytes& send_key,
                       const KeyBytes& receive_key) {
  require_process();
  if (peer < 0 || static_cast<size_t>(peer) >= links_.size() || peer == rank_ || links_[peer]) {
    throw std::invalid_argument("a link to a rank that cannot have one");
  }
  links_[peer] = std::make_unique<Link>(peer, std::move(pipe), send_key, receive_key, rekey_bytes_,
                                        keyring_, pool_);
  close_in_children(links_[peer]->socket());
}

void Mailbox::attach(std::unique_ptr<Device> device) {
  require_process();
  const Lock lock(lock_);
  if (device_) throw std::invalid_argument("the mailbox has a device already");
  // All keys now: later a GPU is at work, and streams wait for it.
  std::vector<SealingKey*> sealing;
  std::vector<OpeningKey*> opening;
  for (const auto& link : links_) {
    if (!link) continue;
    sealing.push_back(&link->gpu_send_key());
    opening.push_back(&link->gpu_receive_key());
  }
  put_keys(*device, sealing, opening);
  device_ = std::move(device);
  gpu_pool_.take_memory_of(device_.get());
  if (device_->persistent_kernel() != nullptr) {
    mover_is_done_ = false;
    mover_ = std::thread([this] { move_for_streams(); });
    ::pthread_setname_np(mover_.native_handle(), "sealring mover");
  }
}

// ---- what the caller sees ----------------------------------------------------------------------

void Mailbox::require_alive() const {
  if (failure_) throw *failure_;
  if (closed_) throw Failure(FailureCode::closed, -1, "the group is closed");
}

// For a thread that does not drive: ends the group, if it is to end.
void Mailbox::require_lease(Lock& lock) {
  if (!lease_) return;
  try {
    lease_->require(rank_, names());
  } catch (const Failure& failure) {
    failure_ = first_failure_->settle(failure);
    abandon_in_flight();
    wait_for_driver(lock);
    throw end_with(failure);
  }
}

void Mailbox::require_link(int peer) const {
  if (peer < 0 || static_cast<size_t>(peer) >= links_.size() || !links_[peer]) {
    throw std::invalid_argument("a message to or from a rank that is not there");
  }
}

void Mailbox::require_device(const std::optional<CallerStream>& place) const {
  if (place && !device_) throw std::invalid_argument("there is no device attached");
}

Mailbox::Ticket Mailbox::send(int peer, uint32_t tag, const uint8_t* from, size_t bytes,
                              double timeout_s, std::optional<CallerStream> place) {
  require_process();
  Lock lock(lock_);
  require_alive();
  require_lease(lock);
  require_link(peer);
  require_device(place);
  const uint32_t number = number_for(lock, place);
  const Ticket ticket = new_ticket(place, number, {});
  peers_[peer].unannounced.push_back(
      {ticket, tag, from, bytes, ready_of(place, number), timeout_s, Clock::now()});
  try {
    // A short message is gone before the call returns, if its link has room.
    if (!driving_) with_device([&] { return write(*links_[peer]); });
  } catch (const Failure& failure) {
    throw end_with(failure);
  }
  wake();
  return ticket;
}

Mailbox::Ticket Mailbox::receive(int peer, uint32_t tag, uint8_t* into, size_t bytes,
                                 double timeout_s, std::optional<CallerStream> place) {
  require_process();
  Lock lock(lock_);
  require_alive();
  require_lease(lock);
  if (peer != kAnyone) require_link(peer);
  require_device(place);
  const uint32_t number = number_for(lock, place);
  const Ticket ticket = new_ticket(place, number, {into, bytes});
  waiting_.push_back(
      {ticket, peer, tag, into, bytes, ready_of(place, number), timeout_s, Clock::now()});
  new_receives_ = true;
  try {
    if (!driving_) with_device([&] { match_arrivals(); });
  } catch (const Failure& failure) {
    throw end_with(failure);
  }
  wake();
  return ticket;
}

Mailbox::Ticket Mailbox::new_ticket(const std::optional<CallerStream>& place, uint32_t number,
                                    std::span<uint8_t> into) {
  const Ticket ticket = ++last_ticket_;
  tickets_[ticket] = std::nullopt;
  if (place) on_device_[ticket] = {number, into};
  // The group's thread waits for the caller's wait() only where the host waits.
  if (number == 0) posted_ = Clock::now();
  return ticket;
}

std::optional<int> Mailbox::wait(Ticket ticket, const std::function<bool()>& signal_pending) {
  require_process();
  Lock lock(lock_);
  const auto over = [&] {
    const auto entry = tickets_.find(ticket);
    return entry == tickets_.end() || entry->second.has_value();
  };
  while (!over()) {
    require_alive();
    if (driving_) {
      changed_.wait_for(lock, kLook);
      if (over()) break;
      lock.unlock();
      const bool leaves = signal_pending();
      lock.lock();
      if (leaves) throw Failure(FailureCode::closed, -1, "the script was interrupted");
    } else {
      drive(lock, over, signal_pending);
    }
  }
  const auto entry = tickets_.find(ticket);
  if (entry == tickets_.end()) return std::nullopt;
  const int peer = *entry->second;
  tickets_.erase(entry);
  return peer;
}

std::vector<std::pair<Mailbox::Ticket, int>> Mailbox::finished() {
  require_process();
  Lock lock(lock_);
  for (;;) {
    std::vector<std::pair<Ticket, int>> out;
    for (Ticket ticket : news_) {
      const auto entry = tickets_.find(ticket);
      if (entry == tickets_.end()) continue;  // its waiter has it
      out.emplace_back(ticket, *entry->second);
      tickets_.erase(entry);
    }
    news_.clear();
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
  return !waiting_.empty() || !matched_.empty() || !in_flight_.empty() ||
         std::any_of(peers_.begin(), peers_.end(), busy) ||
         std::any_of(links_.begin(), links_.end(),
                     [](const auto& link) { return link && !link->idle(); });
}

void Mailbox::done(Ticket ticket, int peer) {
  tickets_[ticket] = peer;
  if (const auto found = on_device_.find(ticket); found != on_device_.end()) {
    if (found->second.number != 0) device_->persistent_kernel()->release_waiters(found->second.number);
    on_device_.erase(found);
    stop_kernel_if_idle();
  }
  news_.push_back(ticket);
  changed_.notify_all();
}

void Mailbox::close() {
  if (!process_.here()) return;
  Lock lock(lock_);
  if (closed_ || failure_) return;
  closed_ = true;
  abandon_in_flight();
  wait_for_driver(lock);
  send_last_records(links_, Kind::bye, {}, {});
  wipe();
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
  abandon_in_flight();
  wait_for_driver(lock);
  end_with(failure);
}

// Only the thread that moves messages touches the links. It stops when it sees that the group has ended.
void Mailbox::wait_for_driver(Lock& lock) {
  wake();
  while (driving_) changed_.wait(lock);
}

const Failure& Mailbox::end_with(const Failure& failure) {
  failure_ = first_failure_->settle(failure);
  abandon_in_flight();
  send_last_records(links_, Kind::alert, encode_alert(*failure_, rank_), {});
  wipe();
  return *failure_;
}

// The keys' destructors overwrite them.
void Mailbox::wipe() {
  stats_ = {stats_.sealed_bytes, stats_.opened_bytes, 0};
  for (auto& link : links_) {
    if (link) forget_in_children(link->socket());
    link.reset();
  }
  if (device_) device_->wipe();
  waiting_.clear();
  arrivals_.clear();
  matched_.clear();
  peers_.assign(peers_.size(), Peer{});
  wake();
  changed_.notify_all();
}

void Mailbox::wake() {
  const uint64_t one = 1;
  (void)!::write(wake_, &one, sizeof one);
  changed_.notify_all();
}

Mailbox::Stats Mailbox::stats() const {
  require_process();
  const Lock lock(lock_);
  Stats out = stats_;
  out.memory_bytes = pool_.bytes() + gpu_pool_.bytes() + (device_ ? device_->memory_bytes() : 0);
  for (const auto& link : links_) {
    if (link) out.memory_bytes += link->memory_bytes();
  }
  return out;
}

bool Mailbox::step() {
  return with_device([this] {
    awaits_stream_ = false;
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
