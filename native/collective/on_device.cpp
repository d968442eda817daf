// Collectives whose tensors are in a device's memory: steps are begun on the device, and settled when it has
// finished them.
#include "collective/collective.hpp"

#include <algorithm>
#include <string>

#include "device/sealing_on_device.hpp"

namespace sealring {

void Collective::compute_on_device(Segment& segment, const Step& step) {
  const size_t bytes = length(segment, step.slot);
  if (bytes == 0) return;
  uint8_t* const into = at(segment, step.slot);
  const uint64_t queue = queue_of(segment.number);
  switch (step.action) {
    case Action::copy:
      if (into != at(segment, step.source))
        device_->copy(queue, into, at(segment, step.source), bytes);
      break;
    case Action::reduce:
      device_->reduce(queue, into, at(segment, step.source), bytes);
      break;
    case Action::average:
      device_->average(queue, into, bytes);
      break;
    case Action::premultiply:
      device_->premultiply(queue, into, bytes);
      break;
    default:
      break;  // a step with peers has no arithmetic here
  }
}

SealingKey& Collective::device_key(const Step& step) const {
  const bool alone = step.action == Action::send;
  return alone ? links_[step.peers[0]]->gpu_send_key() : *keyring_.own_group_gpu;
}

bool Collective::device_has_room(const Segment& segment, const Step& step) const {
  if (!device_->has_room()) return false;
  if (step.peers.empty()) return true;
  // To replace a key, the device waits for all the work it was given, which may depend on a peer. So that
  // work is settled first, in the loop that checks for a timeout.
  const size_t bytes = length(segment, step.slot);
  if (!on_device_.empty() && device_key(step).ratchets_before(bytes, records_in_run(bytes)))
    return false;
  switch (way_to(step.peers[0])) {
    case Wires::Way::exchange:
      return true;
    case Wires::Way::area:
      return wires_->has_room();
    case Wires::Way::link:
      break;
  }
  return std::all_of(step.peers.begin(), step.peers.end(),
                     [this](int peer) { return links_[peer]->has_room_for_device(); });
}

void Collective::seal_on_device(Header& header, const Segment& segment, const uint8_t* plain,
                                int index) {
  const Step& step = program_.steps[index];
  const bool alone = step.action == Action::send;
  SealingKey& key = device_key(step);
  header.kind = alone ? Kind::pair : Kind::group;
  header.sender = static_cast<uint32_t>(keyring_.rank);
  header.receiver = alone ? static_cast<uint32_t>(step.peers[0]) : kEveryone;
  const size_t bytes = length(segment, step.slot);
  reserve(key, header, bytes);
  const Wires::Way way = way_to(step.peers[0]);
  // The buffer that leaves over the links.
  BufferRef record = (way == Wires::Way::link ? *keyring_.gpu_pool : pool_).take();
  Device::Area area{record->record};
  RecordOnDevice sealed{0, {}, -1, step.peers};
  if (way == Wires::Way::link) {
    header.lane = kGpuLane;
    record->size = kRecordOverhead + bytes;
  } else {
    header.lane = kWireLane;
    if (way == Wires::Way::exchange) {
      sealed.round = exchanging_->round_of(segment.number, index);
      area = {exchanging_->place_to_seal(segment.number, index), true};
    } else {
      const uint32_t slot = wires_->lend(step.peers);
      header.lane += slot;
      area = wires_->own_slot(slot);
    }
    record->size = kSealedHeaderBytes;
    seal_header(key, keyring_.context, header, record->record);
  }
  sealed.ticket = seal_on(*device_, queue_of(segment.number), key, keyring_.context, header, plain,
                          bytes, area);
  sealed.record = std::move(record);
  on_device_.push(links_, std::move(sealed));
}

bool Collective::open_on_device(Link& link, Segment& segment, int index) {
  if (!device_->has_room()) return false;
  const Step& step = program_.steps[index];
  const Header header = link.header();
  OpeningKey& key = link.arrived_key();
  const bool replaced = key.on_device.slot >= 0 && key.on_device.generation != key.generation();
  if (replaced && !on_device_.empty()) return false;  // as in device_has_room
  const size_t bytes = length(segment, step.slot);
  key.expected_count += records_in_run(bytes) - 1;  // the link has counted the first of them
  BufferRef record = link.take_for_device();
  const Device::Area area = way_to(link.peer) == Wires::Way::link
                                ? Device::Area{record->record}
                                : wires_->slot_of(link.peer, header.lane - kWireLane);
  const Device::Ticket ticket =
      open_on(*device_, queue_of(segment.number), slot_of(*device_, key), keyring_.context, header,
              bytes, area, at(segment, step.slot), step.action == Action::receive_reduce);
  stats_.opened_records += records_in_run(bytes);
  stats_.opened_bytes += bytes;
  if (--expected_[link.peer] == 0) link.expecting = false;
  // The record is forwarded only after it has proved authentic.
  RecordOnDevice opened{ticket, std::move(record), link.peer, {}};
  for (int forward : program_.forwards[index]) {
    const std::vector<int>& peers = program_.steps[forward].peers;
    opened.peers.insert(opened.peers.end(), peers.begin(), peers.end());
    ++stats_.forwarded_records;
    finish(segment, forward);
  }
  on_device_.push(links_, std::move(opened));
  finish(segment, index);
  return true;
}

// Keeps what opening the record needs (header, key slot): the link's next record may bring another key.
bool Collective::announce(Link& link, Segment& segment, int index) {
  const uint64_t round = exchanging_->round_of(segment.number, index);
  if (!exchanging_->reachable(round)) return false;
  OpeningKey& key = link.arrived_key();
  const bool replaced = key.on_device.slot >= 0 && key.on_device.generation != key.generation();
  if (replaced && (!on_device_.empty() || exchanging_->awaits(key))) return false;
  const size_t bytes = length(segment, program_.steps[index].slot);
  key.expected_count += records_in_run(bytes) - 1;  // the link has counted the first of them
  if (!exchanging_->announce({round, segment.number, index, link.peer, link.header(), &key,
                              slot_of(*device_, key), nullptr})) {
    throw Failure(FailureCode::replayed, link.peer, "a record's place in the collective is taken");
  }
  if (--expected_[link.peer] == 0) link.expecting = false;
  link.take_for_device();
  return true;
}

bool Collective::open_arrived() {
  bool moved = false;
  std::vector<Announced>& arrived = exchanging_->arrived();
  for (size_t i = 0; i < arrived.size();) {
    if (!device_->has_room()) break;
    Segment& segment = window_[arrived[i].segment % window_.size()];
    const int index = arrived[i].step;
    if (segment.waits[index] != 0) {
      ++i;
      continue;
    }
    const Announced record = std::move(arrived[i]);
    arrived.erase(arrived.begin() + static_cast<std::ptrdiff_t>(i));
    const Step& step = program_.steps[index];
    const size_t bytes = length(segment, step.slot);
    RecordOnDevice opened{0, {}, record.peer, {}};
    opened.ticket = open_on(*device_, queue_of(segment.number), record.key_slot, keyring_.context,
                            record.header, bytes, {record.at, true, true}, at(segment, step.slot),
                            step.action == Action::receive_reduce);
    opened.round = record.round;
    stats_.opened_records += records_in_run(bytes);
    stats_.opened_bytes += bytes;
    on_device_.push(links_, std::move(opened));
    finish(segment, index);
    moved = true;
    i = 0;  // other records may have waited for this step
  }
  return moved;
}

bool Collective::settle() {
  return on_device_.settle(*device_, links_, [this](const RecordOnDevice& done) {
    const bool opened = done.sender >= 0;
    if (done.round) {
      opened ? exchanging_->opened(*done.round) : exchanging_->sealed(*done.round, done.peers);
    } else if (opened && way_to(done.sender) == Wires::Way::area) {
      send_fetched(*links_[done.sender]);
    }
  });
}

void Collective::send_fetched(Link& link) {
  Header header;
  header.kind = Kind::fetched;
  header.total = wires_->fetched(link.peer);
  link.send(header, nullptr);
}

void Collective::on_fetched(Link& link) {
  link.open(link.arrived_payload());
  if (wires_ == nullptr || !wires_->returned(link.peer, link.header().total)) {
    throw Failure(FailureCode::out_of_step, link.peer,
                  "the peer says that it fetched records which it was not lent");
  }
  link.take();
}

void Collective::require_same_place(const Link& link) const {
  const Header& header = link.header();
  if (header.collective != call_.number) return;
  const bool theirs_on_gpu = header.lane != keyring_.lane;
  const bool by_link = way_to(link.peer) == Wires::Way::link;
  if (theirs_on_gpu && device_ != nullptr && (header.lane == kGpuLane) != by_link) {
    throw Failure(
        FailureCode::out_of_step, link.peer,
        names().rank(header.sender) +
            " takes another way for what its GPU sealed than this rank: they disagree on it");
  }
  if (theirs_on_gpu == (device_ != nullptr)) return;
  const auto place = [](bool on_gpu) { return on_gpu ? "a GPU" : "the CPU"; };
  throw Failure(FailureCode::out_of_step, link.peer,
                names().rank(header.sender) + " has its tensor on " + place(theirs_on_gpu) + ", " +
                    names().rank(keyring_.rank) + " on " + place(device_ != nullptr) +
                    ": all ranks must keep theirs on the same");
}

}  // namespace sealring
