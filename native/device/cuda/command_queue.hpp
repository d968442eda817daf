// What a GPU is told to do while nobody calls CUDA: commands, in batches, through host memory.
//
// While a stream waits, a thread that calls CUDA may have to wait for that stream (docs/performance.md).
// So whoever works for what streams wait for only writes to memory. Kernels that were launched before
// read it: a shift per batch for collectives (shifts.hpp), one that stays for messages (porter.hpp).
#pragma once

#include <cstdint>

#include "device/cuda/launch.hpp"

namespace sealring {

class Commands {
 public:
  virtual ~Commands() = default;

  // Whether another command can be added now.
  virtual bool has_room() const = 0;
  // Commands of one queue are obeyed one after the other, others together. Returns the number of the
  // batch that it is in.
  virtual uint64_t add(uint64_t queue, const gpu::Command& command) = 0;
  // Hands over what was added, unless the GPU has enough to do.
  virtual void hand_over() = 0;
  // In any case: what is added next comes after it.
  virtual void hand_over_now() = 0;
  virtual bool done(uint64_t batch) const = 0;
  // Forgets what was added and not handed over; returns when all else is done.
  virtual void abandon() = 0;
};

// A GPU that has not done for so long what it was told has died, and answers nobody. Streams that wait
// for it will wait for ever.
[[noreturn]] void end_process_of_a_dead_gpu();

}  // namespace sealring
