// One submitted operation, a collective or a message: running, done or failed.
//
// An operation moves only while a thread runs it. A thread that waits on the host runs its collective, or its
// message together with the group's other messages. Streams wait through the device's command queue, while
// another thread runs the operation for them.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>

#include "device/command_queue.hpp"
#include "record/failure.hpp"

namespace sealring {

class Endpoint;

// The caller's stream, for an operation on tensors in a device's memory.
struct CallerStream {
  uint64_t ready = 0;  // the event after which the memory may be used; 0: at once
  uint64_t stream = 0;
  // Whether streams are to wait for the operation, if that is possible now.
  bool streams_wait = false;
};

// How a thread waits for an operation.
struct HostWait {
  // Polled while waiting. Returns true if a signal came and the caller wants to leave.
  std::function<bool()> signal_pending = [] { return false; };
  // For a collective, which gets its number when it is run.
  uint64_t number = 0;
  double timeout_s = 0;
};

class Completion {
 public:
  Completion(Endpoint& owner, const Submitted& submitted) : owner_(owner), submitted_(submitted) {}
  virtual ~Completion() = default;
  Completion(const Completion&) = delete;
  Completion& operator=(const Completion&) = delete;

  // Runs the operation, or waits for the thread that does. Throws its failure.
  void wait_on_host(const HostWait& how);
  // Later work of the stream waits until the operation is done, or has failed and its results are
  // overwritten. CUDA may block the caller.
  void wait_on_stream(uint64_t stream) const;
  bool streams_wait() const { return submitted_.number != 0; }
  // Whether the operation is done. If streams wait for it: whether they may go on.
  bool done() const;
  std::optional<Failure> error() const;
  // The rank at the other end of a message that is done.
  int peer() const { return peer_; }

  // ---- for its owner
  const Submitted& submitted() const { return submitted_; }
  Endpoint& owner() const { return owner_; }
  bool ended() const { return ended_.load(std::memory_order_acquire); }
  void end(int peer) {
    peer_ = peer;
    ended_.store(true, std::memory_order_release);
  }
  void end(const Failure& failure) {
    if (ended()) return;
    failure_ = failure;
    ended_.store(true, std::memory_order_release);
  }
  bool reported = false;  // a waiting thread or finished() has reported that it is done

 private:
  Endpoint& owner_;
  const Submitted submitted_;
  int peer_ = -1;
  std::optional<Failure> failure_;
  std::atomic<bool> ended_{false};
};

}  // namespace sealring
