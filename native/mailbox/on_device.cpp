// Messages in a device's memory: the device seals and opens their records.
//
// A record is given to the device only when its memory may be used. So no record on the device waits for a
// stream of the caller, nor holds up the records behind it.
#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>

#include "device/sealing_on_device.hpp"
#include "mailbox/mailbox.hpp"

namespace sealring {
namespace {

// The most buffers for records, which are in pinned memory: those the device works on, those of one link, and
// those of all links together, however many there are.
constexpr size_t kInHand = 40, kOnALink = 16, kOnLinks = 144;
// This many of them are kept for receiving. A record that has begun to arrive needs only its sender, and then
// the device opens it. So these buffers become free again, whatever happens to records that are sent.
constexpr size_t kForReceiving = 16;
// How often to check whether a stream has come to its call.
constexpr std::chrono::milliseconds kGlance{1};
// Time for the group to record the error before streams are released. CUDA or the interpreter may block
// the threads that record it until streams go on, so this has a limit.
constexpr std::chrono::milliseconds kToBeTold{500};

}  // namespace

size_t Mailbox::most_buffers(size_t world) {
  return kInHand + std::min(kOnALink * (world - 1), kOnLinks);
}

bool Mailbox::may_seal_on_device(const Link& link) const {
  return device_->has_room() && link.has_room_for_device() &&
         gpu_pool_.room() > std::min(links_.size(), kForReceiving);
}

// ---- messages that streams wait for ------------------------------------------------------------

// Returns the message's number in the command queue, or 0 if its kernels are launched one by one. The
// persistent kernel is launched for the first message that streams wait for, and then runs all messages. It
// cannot be launched while other messages' kernels are launched one by one.
uint32_t Mailbox::number_for(Lock& lock, const CallerStream& caller) {
  CommandQueue* const queue = command_queue();
  if (queue == nullptr) return 0;
  changed_.wait(lock, [this] { return !kernel_starting_; });
  require_alive();
  if (!queue->running()) {
    if (!caller.streams_wait || !on_device_.empty()) return 0;
    start_persistent_kernel(lock);
  }
  const uint32_t number = queue->take_number();
  if (number == 0) {
    throw std::runtime_error("more than " + std::to_string(CommandQueue::kNumbers) +
                             " messages of a GPU are under way: wait for some of them first");
  }
  ++posting_;
  try {
    call_without(lock, [&] { queue->mark_reached(caller.stream, number); });
    require_alive();
  } catch (...) {
    --posting_;
    queue->release_waiters(number);
    stop_kernel_if_idle();
    throw;
  }
  --posting_;
  return number;
}

void Mailbox::start_persistent_kernel(Lock& lock) {
  kernel_starting_ = true;
  try {
    call_without(lock, [&] {
      device_->enter();
      // Reserved now, because an allocation would wait for the running kernel.
      device_->reserve_pinned_memory(gpu_pool_.slab_bytes(), most_buffers(links_.size()));
      device_->command_queue()->launch();
    });
  } catch (...) {
    kernel_starting_ = false;
    throw;
  }
  kernel_starting_ = false;
  device_->command_queue()->mark_running();
  if (failure_ || closed_) device_->command_queue()->stop(false);
  require_alive();
}

bool Mailbox::persistent_kernel_runs() const {
  require_process();
  const Lock lock(lock_);
  return kernel_runs();
}

// The kernel ends with the last message.
void Mailbox::stop_kernel_if_idle() {
  if (kernel_runs() && on_device_.empty() && posting_ == 0) command_queue()->stop(false);
}

bool Mailbox::kernel_runs() const {
  return command_queue() != nullptr && command_queue()->running();
}

void Mailbox::move_for_streams() {
  Lock lock(lock_);
  while (!failure_ && !closed_) {
    if (driving_ || !kernel_runs()) {
      changed_.wait(lock);
      continue;
    }
    try {
      drive(lock, [this] { return !kernel_runs(); }, [] { return false; });
    } catch (const Failure&) {  // it has ended the group
    } catch (const std::exception& broken) {
      end_with(Failure(FailureCode::closed, -1,
                       names().rank(rank_) + " cannot move messages: " + broken.what()));
    }
  }
  while (driving_) changed_.wait(lock);
  changed_.wait_for(lock, kToBeTold, [this] { return streams_released_; });
  while (!poison_results()) changed_.wait_for(lock, kGlance);
  mover_is_done_ = true;
  changed_.notify_all();
}

void Mailbox::release_streams() {
  if (!process_.here()) return;
  const Lock lock(lock_);
  streams_released_ = closed_ || failure_;
  changed_.notify_all();
}

// Called when the mailbox has ended. Releases the streams that wait for messages which will not come, after
// it overwrites these messages' results with ones. A result is overwritten only when the caller's stream has
// come to the call: until then other work may use the memory. Returns false while such messages remain.
bool Mailbox::poison_results() noexcept {
  if (!kernel_runs()) return true;
  CommandQueue& queue = *command_queue();
  for (auto next = on_device_.begin(); next != on_device_.end();) {
    const auto& [message, into] = *next;
    if (!into.empty() && !queue.reached(message->submitted().number)) {
      ++next;
      continue;
    }
    queue.fail(message->submitted(), {&into, into.empty() ? size_t{0} : 1});
    next = on_device_.erase(next);
  }
  if (!on_device_.empty()) return false;
  queue.stop(true);
  return true;
}

// Whether the caller's stream has come to the call, whose memory may then be used.
bool Mailbox::reached(UnderWay& message) {
  if (!message.ready || message.reached) return true;
  const uint32_t number = message.completion->submitted().number;
  message.reached =
      number != 0 ? command_queue()->reached(number) : device_->reached(*message.ready);
  awaits_stream_ |= !message.reached;
  return message.reached;
}

void Mailbox::seal_on_device(Link& link, Header& header, const UnderWay& message) {
  header.sender = static_cast<uint32_t>(rank_);
  header.receiver = static_cast<uint32_t>(link.peer);
  BufferRef record = gpu_pool_.take();
  record->size = kRecordOverhead + header.length;
  header.lane = kGpuLane;
  SealingKey& key = link.gpu_send_key();
  reserve(key, header, header.length);
  const Device::Ticket ticket =
      seal_on(*device_, records_ever_++, key, keyring_.context, header,
              message.memory + message.processed, header.length, {record->record});
  records_.push(
      links_,
      {ticket, std::move(record), -1, {link.peer}, nullptr, message.timeout_s, Clock::now()});
}

void Mailbox::open_on_device(Link& link, const UnderWay& incoming, bool last) {
  const Header header = link.header();
  OpeningKey& key = link.arrived_key();
  BufferRef record = link.take_for_device();
  const Device::Ticket ticket =
      open_on(*device_, records_ever_++, slot_of(*device_, key), keyring_.context, header,
              header.length, {record->record}, incoming.memory + incoming.processed, false);
  records_.push(links_, {ticket,
                         std::move(record),
                         link.peer,
                         {},
                         last ? incoming.completion : nullptr,
                         incoming.timeout_s,
                         Clock::now()});
}

// Records are settled in order, so a message is done when its last record has proved authentic.
bool Mailbox::settle() {
  return device_ && records_.settle(*device_, links_, [this](const RecordOnDevice& opened) {
    if (opened.ends) done(opened.ends, opened.sender);
  });
}

// Makes the device stop writing to callers' memory. Called before anybody can learn that the mailbox has
// ended and use that memory again.
void Mailbox::abandon_records() noexcept {
  if (device_) device_->abandon();
  records_.clear();
}

void Mailbox::require_same_place(const UnderWay& incoming, const Arrival& arrival) const {
  const bool theirs_on_gpu = arrival.location == PayloadLocation::on_senders_gpu;
  if (theirs_on_gpu == incoming.ready.has_value()) return;
  const auto place = [](bool on_gpu) { return on_gpu ? "a GPU" : "the CPU"; };
  throw Failure(FailureCode::out_of_step, arrival.peer,
                names().rank(arrival.peer) + " has its tensor on " + place(theirs_on_gpu) + ", " +
                    names().rank(rank_) + " on " + place(!theirs_on_gpu) +
                    ": both ends of a message, here with tag " + std::to_string(arrival.tag) +
                    ", must keep theirs on the same");
}

}  // namespace sealring
