// Messages whose tensors a device holds: it seals and opens their records, in its own time.
//
// A record is given to the device only when its memory may be used. So no record waits on the device
// for a stream of the caller's, and none behind it does.
#include <chrono>
#include <stdexcept>
#include <string>

#include "mailbox/mailbox.hpp"
#include "device/cuda/persistent_kernel.hpp"
#include "device/sealing_on_device.hpp"

namespace sealring {
namespace {

// Buffers for records: what the device has in hand, and what a link can have.
constexpr size_t kInHand = 40, kOnALink = 16;
// How often a stream is glanced at that has not come to its call.
constexpr std::chrono::milliseconds kGlance{1};
// Whoever sees that a message failed shall find out why. But CUDA, or the interpreter, may keep those who
// know it from saying so until streams go on.
constexpr std::chrono::milliseconds kToBeTold{500};

}  // namespace

// ---- messages that streams wait for ------------------------------------------------------------

// The porter comes in with the first of them, and does then what all messages need. While there are
// others, for which kernels are launched, it cannot.
uint32_t Mailbox::number_for(Lock& lock, const std::optional<OnDevice>& place) {
  Porter* const porter = place ? device_->porter() : nullptr;
  if (porter == nullptr) return 0;
  changed_.wait(lock, [this] { return !porter_comes_; });
  require_alive();
  if (!porter->is_in()) {
    if (!place->streams_wait || !on_device_.empty()) return 0;
    let_porter_in(lock);
  }
  const uint32_t number = porter->take_number();
  if (number == 0) {
    throw std::runtime_error("more than " + std::to_string(Porter::kNumbers) +
                             " messages of a GPU are under way: wait for some of them first");
  }
  ++posting_;
  try {
    call_without(lock, [&] { porter->mark(reinterpret_cast<cuda::Handle>(place->stream), number); });
    require_alive();
  } catch (...) {
    --posting_;
    porter->let_go(number);
    porter_may_leave();
    throw;
  }
  --posting_;
  return number;
}

void Mailbox::let_porter_in(Lock& lock) {
  porter_comes_ = true;
  try {
    call_without(lock, [&] {
      device_->enter();
      // So that nobody has to ask CUDA for memory while it is in.
      device_->stock_host_memory(gpu_pool_.slab_bytes(), kInHand + kOnALink * (links_.size() - 1));
      device_->porter()->launch();
    });
  } catch (...) {
    porter_comes_ = false;
    throw;
  }
  porter_comes_ = false;
  device_->porter()->come_in();
  if (failure_ || closed_) device_->porter()->leave();
  require_alive();
}

// CUDA may keep the caller waiting until the GPU has come further. Whoever moves messages must not wait
// for that.
template <typename Call>
void Mailbox::call_without(Lock& lock, Call call) {
  ++calling_;
  const auto called = [this, &lock] {
    lock.lock();
    --calling_;
    changed_.notify_all();
  };
  lock.unlock();
  try {
    call();
  } catch (...) {
    called();
    throw;
  }
  called();
}

uint32_t Mailbox::number_of(Ticket ticket) const {
  require_process();
  const Lock lock(lock_);
  const auto found = on_device_.find(ticket);
  return found == on_device_.end() ? 0 : found->second.number;
}

void Mailbox::hold(uint64_t stream, uint32_t number) {
  require_process();
  Lock lock(lock_);
  if (!device_) return;  // all were let go
  Porter* const porter = device_->porter();
  call_without(lock, [&] { porter->hold(reinterpret_cast<cuda::Handle>(stream), number); });
}

bool Mailbox::is_over(uint32_t number) const {
  require_process();
  const Lock lock(lock_);
  return !device_ || device_->porter()->is_over(number);
}

bool Mailbox::porter_is_in() const {
  require_process();
  const Lock lock(lock_);
  return porter_works();
}

std::optional<uint64_t> Mailbox::ready_of(const std::optional<OnDevice>& place, uint32_t number) {
  if (!place) return std::nullopt;
  return number != 0 ? number : place->ready;
}

// It leaves with the last message.
void Mailbox::porter_may_leave() {
  Porter* const porter = device_->porter();
  if (porter != nullptr && porter->is_in() && on_device_.empty() && posting_ == 0) porter->leave();
}

bool Mailbox::porter_works() const {
  return device_ && device_->porter() != nullptr && device_->porter()->is_in();
}

void Mailbox::move_for_streams() {
  Lock lock(lock_);
  while (!failure_ && !closed_) {
    if (driving_ || !porter_works()) {
      changed_.wait(lock);
      continue;
    }
    try {
      drive(lock, [this] { return !porter_works(); }, [] { return false; });
    } catch (const Failure&) {  // it has ended the group
    } catch (const std::exception& broken) {
      end_with(Failure(FailureCode::closed, -1,
                       names().rank(rank_) + " cannot move messages: " + broken.what()));
    }
  }
  while (driving_) changed_.wait(lock);
  changed_.wait_for(lock, kToBeTold, [this] { return streams_may_go_on_; });
  while (!spoil()) changed_.wait_for(lock, kGlance);
  mover_is_done_ = true;
  changed_.notify_all();
}

void Mailbox::let_streams_go_on() {
  if (!process_.here()) return;
  const Lock lock(lock_);
  streams_may_go_on_ = closed_ || failure_;
  changed_.notify_all();
}

// When the mailbox has ended: streams go on that wait for messages which will not come. They find their
// results overwritten with ones, but not before the caller's stream has come to the call: until then
// others may use the memory. False as long as there are such messages.
bool Mailbox::spoil() noexcept {
  Porter* const porter = device_ ? device_->porter() : nullptr;
  if (porter == nullptr || !porter->is_in()) return true;
  for (auto next = on_device_.begin(); next != on_device_.end();) {
    const auto& [number, into] = next->second;
    if (!into.empty() && !porter->has_come(number)) {
      ++next;
      continue;
    }
    if (!into.empty()) device_->spoil_message(into);
    porter->let_go(number);
    next = on_device_.erase(next);
  }
  if (!on_device_.empty()) return false;
  device_->dismiss_porter();
  return true;
}

// Whether the caller's stream has come to the call, whose memory may then be used.
bool Mailbox::reached(std::optional<uint64_t>& ready) {
  if (ready.value_or(0) == 0) return true;
  if (!device_->reached(*ready)) {
    awaits_stream_ = true;
    return false;
  }
  ready = 0;
  return true;
}

void Mailbox::seal_on_device(Link& link, Header& header, const Outgoing& message) {
  header.sender = static_cast<uint32_t>(rank_);
  header.receiver = static_cast<uint32_t>(link.peer);
  BufferRef record = gpu_pool_.take();
  record->size = kRecordOverhead + header.length;
  header.lane = kGpuLane;
  SealingKey& key = link.gpu_send_key();
  reserve(key, header, header.length);
  const Device::Ticket ticket =
      seal_on(*device_, given_count_++, key, keyring_.context, header,
              message.from + message.sealed, header.length, {record->record});
  ++link.promised;
  given_.push_back({ticket, std::move(record), link.peer, false, std::nullopt, message.timeout_s,
                    Clock::now()});
}

void Mailbox::open_on_device(Link& link, const Incoming& incoming, bool last) {
  const Header header = link.header();
  OpeningKey& key = link.arrived_key();
  BufferRef record = link.take();
  const Device::Ticket ticket =
      open_on(*device_, given_count_++, key, keyring_.context, header, header.length,
              {record->record}, incoming.into + incoming.have, false);
  given_.push_back({ticket, std::move(record), link.peer, true,
                    last ? std::optional(incoming.ticket) : std::nullopt, incoming.timeout_s,
                    Clock::now()});
}

// In order: a message is done when the last of its records has proved authentic, and so all of them.
bool Mailbox::settle() {
  bool moved = false;
  while (!given_.empty()) {
    Given& given = given_.front();
    const Device::State state = device_->settle(given.ticket);
    if (state == Device::State::pending) break;
    if (state == Device::State::refused) {
      throw Failure(FailureCode::tampered, given.peer, "a record's payload was changed on the way");
    }
    if (!given.opens) {
      Link& link = *links_[given.peer];
      --link.promised;
      link.enqueue(std::move(given.record));
    } else if (given.ends) {
      done(*given.ends, given.peer);
    }
    given_.pop_front();
    moved = true;
  }
  return moved;
}

// The device must not write to memory that its owner has back. Called before anybody can learn that
// the mailbox has ended.
void Mailbox::abandon_given() noexcept {
  if (device_) device_->abandon();
  given_.clear();
}

void Mailbox::require_same_place(const Incoming& incoming, const Arrival& arrival) const {
  const bool theirs_on_gpu = arrival.place == Place::on_senders_gpu;
  if (theirs_on_gpu == incoming.ready.has_value()) return;
  const auto place = [](bool on_gpu) { return on_gpu ? "a GPU" : "the CPU"; };
  throw Failure(FailureCode::out_of_step, arrival.peer,
                names().rank(arrival.peer) + " has its tensor on " + place(theirs_on_gpu) + ", " +
                    names().rank(rank_) + " on " +
                    place(!theirs_on_gpu) + ": both ends of a message, here with tag " +
                    std::to_string(arrival.tag) + ", must keep theirs on the same");
}

}  // namespace sealring
