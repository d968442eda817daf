// NCCL's sends and receives, found at run time. A channel leads one way, from one rank's GPU to
// another's: a communicator of two of its own and a stream of its own, so nothing that waits on it
// keeps anything else waiting.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "device/cuda/driver.hpp"

namespace sealring::nccl {

inline constexpr size_t kIdBytes = 128;
using Id = std::array<char, kIdBytes>;

// By which both ends of a new channel find each other; throws where there is no NCCL.
Id new_id();

class Channel {
 public:
  // Returns when the other end has come too.
  Channel(std::span<const uint8_t> id, bool sends);
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  // Both are done in the order of their calls, after `when` has come.
  void send(cuda::Pointer from, size_t bytes, cuda::Handle when);
  // `done` is recorded behind it.
  void receive(cuda::Pointer into, size_t bytes, cuda::Handle done);
  // Ends what is under way, if anything is; the channel cannot be used again then.
  void abandon() noexcept;

 private:
  void pass_one_byte(bool sends);

  void* communicator_ = nullptr;
  cuda::Handle stream_ = nullptr;
};

}  // namespace sealring::nccl
