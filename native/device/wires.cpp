#include "device/wires.hpp"

#include <stdexcept>

namespace sealring {

uint32_t Wires::lend(const std::vector<int>& peers) {
  if (free_.empty()) throw std::logic_error("no slot is free");
  const uint32_t slot = free_.back();
  free_.pop_back();
  readers_[slot] = static_cast<int>(peers.size());
  for (int peer : peers) peers_[static_cast<size_t>(peer)].lent.push_back(slot);
  return slot;
}

bool Wires::returned(int peer, uint64_t ever) {
  Peer& reader = peers_.at(static_cast<size_t>(peer));
  if (ever <= reader.returned || ever - reader.returned > reader.lent.size()) return false;
  for (; reader.returned != ever; ++reader.returned) {
    const uint32_t slot = reader.lent.front();
    reader.lent.pop_front();
    if (--readers_[slot] == 0) free_.push_back(slot);
  }
  return true;
}

}  // namespace sealring
