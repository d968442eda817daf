// Messages whose tensors a device holds: it seals and opens their records, in its own time.
//
// A record is given to the device only when its memory may be used. So no record waits on the device
// for a stream of the caller's, and none behind it does.
#include <string>

#include "mailbox.hpp"
#include "sealing_on_device.hpp"

namespace sealring {

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
                "rank " + std::to_string(arrival.peer) + " has its tensor on " +
                    place(theirs_on_gpu) + ", rank " + std::to_string(rank_) + " on " +
                    place(!theirs_on_gpu) + ": both ends of a message, here with tag " +
                    std::to_string(arrival.tag) + ", must keep theirs on the same");
}

}  // namespace sealring
