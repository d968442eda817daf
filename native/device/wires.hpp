// Wires: memory through which devices hand each other records, so that over the link itself only
// their headers travel.
//
// Every rank has one area, cut into slots, which it writes and its peers read. The lane in a record's
// header says in which slot of its sealer's area it lies; a segment's further records follow it there.
// A peer that has fetched what it was lent says so over the link, and a slot is free again when all
// that it was lent to have. The areas are no more trusted than any other way: a record is
// copied to the opener's own memory first.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <vector>

#include "device/device.hpp"
#include "record/record.hpp"

namespace sealring {

class Wires {
 public:
  // `payload` is what a slot holds at most, before it is sealed.
  Wires(int world, uint32_t slots, size_t payload)
      : slots_(slots), payload_(payload), readers_(slots, 0), peers_(static_cast<size_t>(world)) {
    for (uint32_t slot = slots; slot-- > 0;) free_.push_back(slot);
  }

  static size_t area_bytes(uint32_t slots, size_t payload) { return slots * run_stride(payload); }

  uint32_t slots() const { return slots_; }
  size_t payload() const { return payload_; }
  Device::Area own{};
  Device::Area& area_of(int peer) { return peers_.at(static_cast<size_t>(peer)).area; }
  // Where areas cannot be read from afar, over which channel a peer gets what it is lent.
  int& channel_to(int peer) { return peers_.at(static_cast<size_t>(peer)).channel; }
  bool channelled() const {
    return std::any_of(peers_.begin(), peers_.end(),
                       [](const Peer& peer) { return peer.channel >= 0; });
  }
  std::vector<int> channels_to(const std::vector<int>& peers) const;

  // Segments in the air at once. So many that every rank has slots for all that it seals of them.
  uint64_t window(int world) const {
    return std::max<uint64_t>(1, slots_ / static_cast<uint64_t>(world));
  }

  // ---- what this rank lends
  bool has_room() const { return !free_.empty(); }
  uint32_t lend(const std::vector<int>& peers);
  Device::Area own_slot(uint32_t slot) const { return in(own, slot); }
  bool lent_to(int peer) const { return !peers_[static_cast<size_t>(peer)].lent.empty(); }
  bool lends() const { return free_.size() != slots_; }
  // The peer has fetched so many of all that it was ever lent; false if that cannot be.
  [[nodiscard]] bool returned(int peer, uint64_t ever);

  // ---- what it is lent
  Device::Area slot_of(int peer, uint32_t slot) const {
    return in(peers_[static_cast<size_t>(peer)].area, slot);
  }
  // Counts another one as fetched; how many were ever.
  uint64_t fetched(int peer) { return ++peers_[static_cast<size_t>(peer)].fetched; }

 private:
  struct Peer {
    Device::Area area{};
    int channel = -1;
    std::deque<uint32_t> lent;  // slots, in the order in which their headers left
    uint64_t returned = 0;
    uint64_t fetched = 0;
  };
  Device::Area in(const Device::Area& area, uint32_t slot) const {
    return {area.at + slot * run_stride(payload_), area.on_device, area.channel};
  }

  const uint32_t slots_;
  const size_t payload_;
  std::vector<uint32_t> free_;
  std::vector<int> readers_;  // by slot: who has not fetched it yet
  std::vector<Peer> peers_;
};

}  // namespace sealring
