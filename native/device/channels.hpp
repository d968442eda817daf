// Which channel carries records from one rank to another, where devices exchange records.
//
// A channel is a communicator of all ranks with a stream of its own. An exchange ends when the slowest of its
// messages has, and the next one on its channel begins after it. With several channels, messages wait for
// fewer others. Each channel takes GPU memory and a kernel that waits on the GPU, so there is a limit on them:
// up to it, each rank has a channel for each peer and direction; in a larger group several peers share one.
#pragma once

#include <algorithm>
#include <cstddef>

namespace sealring {

class Channels {
 public:
  // Six channels: a CUDA context has eight hardware queues by default, and the streams that compute need some.
  static constexpr int kMostPairings = 3;

  explicit Channels(int world)
      : pairings_(world % 2 == 0 ? world - 1 : world), apart_(std::min(pairings_, kMostPairings)) {}

  size_t count() const { return 2 * static_cast<size_t>(apart_); }

  // Pairs of ranks are divided into pairings, as the games of a tournament into days, so that a rank is in
  // at most one pair of each. A pairing has two channels, one for each direction.
  size_t of(int sender, int receiver) const {
    const int low = std::min(sender, receiver), high = std::max(sender, receiver);
    const int pairing = (high == pairings_ ? 2 * low : low + high) % pairings_;
    return 2 * static_cast<size_t>(pairing % apart_) + (sender > receiver ? 1 : 0);
  }

 private:
  const int pairings_;
  const int apart_;  // pairings whose channels are their own; later ones share these
};

}  // namespace sealring
