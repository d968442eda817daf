// One operation that was submitted, a collective or a message: running, done or failed.
//
// No operation moves by itself. A thread that waits on the host runs it: a collective alone, a message
// together with the group's other messages. Streams wait through the device's command queue, while another
// thread runs the operation for them.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>

#include "device/command_queue.hpp"
#include "record/failure.hpp"

namespace sealring {

class Endpoint;

// Where the caller of an operation is, whose tensors a device holds.
struct CallerStream {
  uint64_t ready = 0;  // the event after which the memory may be used; 0: at once
  uint64_t stream = 0;
  bool streams_wait = false;  // streams are to wait for the operation, if that is possible now
};

// How a thread waits.
struct HostWait {
  // Asked now and then: true if the caller wants to be gone (a signal came).
  std::function<bool()> signal_pending = [] { return false; };
  // Of a collective, which is numbered when it is run.
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
  // Where streams wait: whether they would go on.
  bool done() const;
  std::optional<Failure> error() const;
  // Of a message that is done: the rank at its other end.
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
  bool reported = false;  // a waiting thread, or finished(), has told that it is done

 private:
  Endpoint& owner_;
  const Submitted submitted_;
  int peer_ = -1;
  std::optional<Failure> failure_;
  std::atomic<bool> ended_{false};
};

}  // namespace sealring
