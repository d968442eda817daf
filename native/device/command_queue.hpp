// The queue of a device's operations that streams wait for: collectives and messages.
//
// While a stream waits, a thread that calls CUDA may block until that stream goes on (docs/performance.md).
// So a thread that runs an operation for waiting streams makes no CUDA calls: it writes commands to memory,
// and kernels that were launched before read them. There are two strategies. For collectives, one kernel per
// batch of commands is launched ahead. For messages, one kernel reads batch after batch
// (device/cuda/command_batches.hpp).
//
// An operation gets a number when it is submitted. The caller's stream writes the number to memory when it
// reaches the call; from then on the operation's memory may be used. Streams wait until the operation is
// done.
#pragma once

#include <cstdint>
#include <span>

namespace sealring {

// What was launched ahead on a device for an operation.
struct Submitted {
  uint32_t number = 0;  // the number that streams wait for; 0 if they cannot wait
  // For prelaunched kernels: the first kernel's number, how many there are, and how many more for the
  // commands after a failure.
  uint64_t first = 0;
  uint32_t commands = 0;
  uint32_t spare = 0;
  uint8_t* scratch = nullptr;
  bool exchanges = false;  // whether its exchanges were planned ahead
};

class CommandQueue {
 public:
  virtual ~CommandQueue() = default;
  // The most operations under way at once.
  static constexpr uint32_t kNumbers = 4096;

  // ---- for threads that submit operations, and for those that wait. CUDA may block them.
  // The next operation's number, never 0; 0 when too many are under way.
  virtual uint32_t take_number() = 0;
  // Makes the stream write the number when it reaches this point.
  virtual void mark_reached(uint64_t stream, uint32_t number) const = 0;
  // Later work in the stream waits until the operation is done.
  virtual void wait_on_stream(uint64_t stream, uint32_t number) const = 0;
  virtual bool done(uint32_t number) const = 0;
  // For the persistent kernel: launches it while nothing is under way. After mark_running() commands may be
  // added.
  virtual void launch() const {}
  virtual void mark_running() {}
  // For prelaunched kernels: marks the end of the last operation.
  virtual void mark_end(uint32_t /*number*/) {}

  // ---- for the thread that runs operations
  // Whether kernels read commands now.
  virtual bool running() const = 0;
  // Whether streams may still wait for kernels of this queue.
  virtual bool busy() const = 0;
  // Whether the caller's stream has reached the operation.
  virtual bool reached(uint32_t number) const = 0;
  virtual void release_waiters(uint32_t number) = 0;
  // Releases the streams that wait for an operation which failed or was never run. Before that, overwrites
  // its results with ones, which are NaN in every float type.
  virtual void fail(const Submitted& operation,
                    std::span<const std::span<uint8_t>> results) noexcept = 0;
  // Tells the persistent kernel to end; does not wait for it.
  virtual void stop(bool /*wipe_keys*/) {}
};

}  // namespace sealring
