// Records that leave for other devices, and come from them, in grouped calls.
//
// Where devices cannot read each other's memory, a collective's records go in exchanges. Which records
// belong to which exchange follows from the program alone, so all ranks know it beforehand
// (collective/rounds.hpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace sealring {

struct Transfer {
  int peer;
  uint8_t* at;  // in this device's memory
  size_t bytes;
};

// What one channel (device/channels.hpp) carries for a rank in one round of a collective.
struct Exchange {
  size_t channel = 0;
  std::vector<Transfer> sends = {}, receives = {};
};

struct ExchangeRound {
  std::vector<Exchange> exchanges;  // at least one, each on a channel of its own
  // Kernels launched ahead that may have to run before it, of all that the collective has.
  uint32_t kernels_before = 0;
};

}  // namespace sealring
