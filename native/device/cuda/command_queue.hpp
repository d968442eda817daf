// Commands for kernels that already run or wait on the GPU, written in batches to pinned host memory.
//
// While a stream waits, a thread that calls CUDA may block until that stream goes on
// (docs/performance.md). So the threads that work for waiting streams call CUDA no more: they write
// commands to memory, and kernels that were launched before read them. There are two strategies: a kernel
// per batch, launched ahead, for collectives (prelaunched_kernels.hpp), and one kernel that reads batch
// after batch, for messages (persistent_kernel.hpp).
#pragma once

#include <cstdint>

#include "device/cuda/launch.hpp"

namespace sealring {

class CommandQueue {
 public:
  virtual ~CommandQueue() = default;

  // Whether another command can be added now.
  virtual bool has_room() const = 0;
  // Commands of one queue run one after the other, those of different queues together. Returns the number
  // of the command's batch.
  virtual uint64_t add(uint64_t queue, const gpu::Command& command) = 0;
  // Submits the commands that were added, unless the GPU has enough to do.
  virtual void submit() = 0;
  // Submits them in any case: a command that is added later runs after them.
  virtual void submit_now() = 0;
  virtual bool done(uint64_t batch) const = 0;
  // Drops the commands that were not submitted; returns when all others are done.
  virtual void abandon() = 0;
};

// Called when the GPU has not run its commands for ten minutes: streams that wait for them would wait for
// ever.
[[noreturn]] void end_process_without_gpu();

}  // namespace sealring
