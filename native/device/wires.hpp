// Wires: memory through which devices pass each other records, so that only the records' headers travel over
// the link.
//
// Every rank has one area, cut into slots, which it writes and its peers read. The lane in a record's header
// names the slot of the sealer's area that holds the record; a segment's further records follow it there. A
// peer that has fetched records says so over the link, and a slot is free again when all peers that it was
// lent to have fetched it. The areas are not trusted: a record is copied to the opener's own memory first.
//
// Peers whose devices cannot read each other's memory exchange records instead (device/exchange.hpp). Records
// that leave are in one area and records that come in another, and other processes can reach neither. All
// other records take the link.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <vector>

#include "device/channels.hpp"
#include "device/device.hpp"
#include "record/record.hpp"

namespace sealring {

class Wires {
 public:
  enum class Way { link, area, exchange };

  // `payload` is the most bytes that a slot holds, before sealing.
  Wires(int world, uint32_t slots, size_t payload)
      : channels(world),
        slots_(slots),
        payload_(payload),
        readers_(slots, 0),
        peers_(static_cast<size_t>(world)) {
    for (uint32_t slot = slots; slot-- > 0;) free_.push_back(slot);
  }

  // The memory of all its areas.
  size_t memory_bytes() const {
    return (own.at != nullptr ? area_bytes(slots_, payload_) : 0) + 4 * half_bytes;
  }
  static size_t area_bytes(uint32_t slots, size_t payload) { return slots * run_stride(payload); }

  uint32_t slots() const { return slots_; }
  size_t payload() const { return payload_; }
  size_t largest_segment() const {
    if (own.at == nullptr) return half_bytes;
    if (exchanges()) return std::min(payload_, half_bytes);
    return mixed ? kGpuPayload : payload_;  // over a link a segment is one record
  }
  Device::Area own{};
  Device::Area& area_of(int peer) { return peers_.at(static_cast<size_t>(peer)).area; }
  // The areas for exchanges: records that leave, and records that come. Each area has two halves of
  // `half_bytes`, for exchanges that follow each other.
  uint8_t* leaving = nullptr;
  uint8_t* arriving = nullptr;
  size_t half_bytes = 0;
  const Channels channels;
  void exchange_with(int peer) { peers_.at(static_cast<size_t>(peer)).exchanges = true; }
  Way way_to(int peer) const {
    const Peer& known = peers_[static_cast<size_t>(peer)];
    if (known.exchanges) return Way::exchange;
    return known.area.at != nullptr ? Way::area : Way::link;
  }
  bool exchanges_with(int peer) const { return way_to(peer) == Way::exchange; }
  // True if only some ranks of the group can reach each other's areas.
  bool mixed = false;
  bool exchanges() const {
    return std::any_of(peers_.begin(), peers_.end(),
                       [](const Peer& peer) { return peer.exchanges; });
  }

  // How many segments may be under way at once: so many that every rank has slots for all that it seals of
  // them. If ranks seal again what they would forward (schedule/relayed.py), each segment needs twice as
  // many.
  uint64_t window(int world) const {
    return std::max<uint64_t>(1, slots_ / static_cast<uint64_t>(mixed ? 2 * world : world));
  }

  // ---- what this rank lends
  bool has_room() const { return !free_.empty(); }
  uint32_t lend(const std::vector<int>& peers);
  Device::Area own_slot(uint32_t slot) const { return in(own, slot); }
  bool lent_to(int peer) const { return !peers_[static_cast<size_t>(peer)].lent.empty(); }
  bool lends() const { return free_.size() != slots_; }
  // The peer says how many of all records that were ever lent to it it has fetched. Returns false if that
  // number is impossible.
  [[nodiscard]] bool returned(int peer, uint64_t ever);

  // ---- what it is lent
  Device::Area slot_of(int peer, uint32_t slot) const {
    return in(peers_[static_cast<size_t>(peer)].area, slot);
  }
  // Counts another record as fetched; returns how many there were in all.
  uint64_t fetched(int peer) { return ++peers_[static_cast<size_t>(peer)].fetched; }

 private:
  struct Peer {
    Device::Area area{};
    bool exchanges = false;
    std::deque<uint32_t> lent;  // slots, in the order in which their records' headers left
    uint64_t returned = 0;
    uint64_t fetched = 0;
  };
  Device::Area in(const Device::Area& area, uint32_t slot) const {
    return {area.at + slot * run_stride(payload_), area.on_device};
  }

  const uint32_t slots_;
  const size_t payload_;
  std::vector<uint32_t> free_;
  std::vector<int> readers_;  // by slot: how many peers have not fetched it yet
  std::vector<Peer> peers_;
};

}  // namespace sealring
