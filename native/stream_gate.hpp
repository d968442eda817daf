// Lets a GPU's streams wait for what a thread of this process finishes, while the host goes on.
//
// A gate is a number in pinned memory that counts up. Whoever closes it draws the next ticket; a
// stream that is held goes on when the number has come to its ticket. Tickets are opened in the
// order in which they were drawn, so one number serves all calls of a group.
#pragma once

#include <cstdint>

#include "cuda_driver.hpp"

namespace sealring {

class StreamGate {
 public:
  // `patience_s`: how long the driver may be out of reach while a gate is closed (driver_watch.hpp).
  // Throws, with the reason, where streams cannot wait or must not.
  StreamGate(int ordinal, double patience_s);
  ~StreamGate();
  StreamGate(const StreamGate&) = delete;
  StreamGate& operator=(const StreamGate&) = delete;

  uint32_t close();
  void hold(uint64_t stream, uint32_t ticket) const;
  void open(uint32_t ticket);

  // Two streams of its own. Torch gives out its streams to several users; one that is held for a
  // ticket must never be the one on whose work the ticket waits.
  uint64_t held() const { return reinterpret_cast<uint64_t>(place_->held); }
  uint64_t free() const { return reinterpret_cast<uint64_t>(place_->free); }

  // What outlives the gate: a stream may come to a wait long after it was opened. So the number and
  // the streams are given to the next group, which counts on.
  struct Place {
    int ordinal = 0;
    uint32_t* number = nullptr;
    uint32_t drawn = 0;
    cuda::Handle context = nullptr;
    cuda::Handle held = nullptr, free = nullptr;
  };

 private:
  const cuda::Driver& cuda_;
  Place* place_;
};

}  // namespace sealring
