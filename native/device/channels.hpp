// Chooses the channel that carries records from one rank to another, if devices exchange records.
//
// A channel is a communicator of all ranks with its own stream. An exchange ends with its slowest message,
// and only then the next exchange on its channel begins. With several channels, a message waits for fewer
// others. Each channel takes GPU memory and a kernel that waits on the GPU, so their number is limited. Up to
// the limit each rank has a channel for each peer and direction; in a larger group several peers share a
// channel.
#pragma once

#include <algorithm>
#include <cstddef>

namespace sealring {

class Channels {
 public:
  // Gives at most six channels: a CUDA context has eight hardware queues by default, and the computing
  // streams need some.
  static constexpr int kMostPairings = 3;

  explicit Channels(int world)
      : pairings_(world % 2 == 0 ? world - 1 : world), apart_(std::min(pairings_, kMostPairings)) {}

  size_t count() const { return 2 * static_cast<size_t>(apart_); }

  // Pairs of ranks are divided into pairings, like the games of a tournament into days: a rank is in at most
  // one pair of each pairing. A pairing has two channels, one for each direction.
  size_t of(int sender, int receiver) const {
    const int low = std::min(sender, receiver), high = std::max(sender, receiver);
    const int pairing = (high == pairings_ ? 2 * low : low + high) % pairings_;
    return 2 * static_cast<size_t>(pairing % apart_) + (sender > receiver ? 1 : 0);
  }

 private:
  const int pairings_;
  const int apart_;  // pairings with their own channels; later pairings share them
};

}  // namespace sealring
