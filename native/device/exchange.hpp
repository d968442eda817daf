// Exchanges: records sent to other devices and received from them in grouped calls.
//
// If devices cannot read each other's memory, a collective's records travel in exchanges. The program alone
// decides which records belong to which exchange, so all ranks know it beforehand (collective/rounds.hpp).
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

// The transfers of one channel (device/channels.hpp) for a rank in one round of a collective.
struct Exchange {
  size_t channel = 0;
  std::vector<Transfer> sends = {}, receives = {};
};

struct ExchangeRound {
  std::vector<Exchange> exchanges;  // at least one, each on a different channel
  // How many of the collective's prelaunched kernels may have to run before this round.
  uint32_t kernels_before = 0;
};

}  // namespace sealring
