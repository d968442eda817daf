// Kernels for a collective, launched before its commands are known.
//
// The caller of the collective launches as many kernels as it can need. Each waits in the stream for its
// number (engine/cuda/prelaunched_kernel.hpp). The group's thread then writes batches of commands to
// memory and counts that number up; it makes no call to CUDA (command_queue.hpp). A kernel whose number
// comes without a batch returns at once.
//
// Processes that share a GPU get it in time slices, and a process with two waiting streams keeps it for
// the whole of its slice (docs/performance.md).
#pragma once

#include <cstdint>
#include <vector>

#include "device/cuda/command_queue.hpp"
#include "device/cuda/driver.hpp"

namespace sealring {

class PrelaunchedKernels : public CommandQueue {
 public:
  // In the calling thread's context.
  explicit PrelaunchedKernels(const cuda::Driver& driver);
  ~PrelaunchedKernels() override;
  PrelaunchedKernels(const PrelaunchedKernels&) = delete;
  PrelaunchedKernels& operator=(const PrelaunchedKernels&) = delete;

  // Pinned host memory for the numbers and the batches.
  static size_t memory_bytes() { return kWords + kBatches * sizeof(gpu::Batch); }

  // The words that streams wait for (wait_words.hpp), and how far they have been counted.
  struct Numbers {
    uint8_t* memory = nullptr;
    uint32_t calls = 0;
    uint64_t launched = 0;
  };

  // ---- for the callers of collectives, one at a time, in the order in which these will be run
  struct KernelShape {
    uint64_t function;  // a kernel `run_one_batch`
    uint32_t parts;     // thread blocks for one record
    uint32_t blocks;    // thread blocks for one command
  };
  // Launches `count` kernels after the work of the caller's stream, or as many as CUDA's queue takes;
  // returns the number of the first.
  uint64_t launch(const KernelShape& shape, uint32_t count, cuda::Handle after);
  // Launches the remaining kernels of the last collective. May block until some of them have run.
  void launch_rest();
  // The stream of the kernels. Later work in it runs after their commands.
  cuda::Handle stream() const { return stream_; }
  // Marks the end of the last collective in the stream; returns the number that streams wait for.
  uint32_t mark_end();
  void make_stream_wait(cuda::Handle stream, uint32_t over) const;
  bool is_done(uint32_t over) const;

  // ---- for the group's thread: one collective after the other
  // `spare` kernels more were launched, for the commands of a failure.
  void begin(uint64_t first, uint32_t count, uint32_t spare);
  // Allows the spare kernels to be used.
  void use_spare() { limit_ = last_; }
  bool has_room() const override;
  uint64_t add(uint64_t queue, const gpu::Command& command) override;
  void submit() override;
  void submit_now() override;
  bool done(uint64_t kernel) const override;
  void abandon() override;
  // Submits all commands and returns when they are done. The kernels that are left return at once.
  void end();

 private:
  static constexpr uint64_t kBatches = 32;
  static constexpr uint64_t kBusy = 2;  // batches submitted at once: the one that runs, and the next
  // More collectives than CUDA's queues hold. Streams reach theirs in any order.
  static constexpr uint32_t kCalls = 1024;
  static constexpr size_t kLine = 128;  // numbers have lines of their own
  static constexpr size_t kWords = 3 * kLine + kCalls * sizeof(uint32_t);

  uint64_t submitted() const { return next_ - 1; }
  uint64_t done() const;
  void wait_until_done();
  void allow_up_to(uint64_t kernel);
  void wait(cuda::Handle stream, const uint32_t* number, uint32_t value) const;
  void launch_some(uint32_t count);

  const cuda::Driver& cuda_;
  cuda::Handle stream_ = nullptr;
  gpu::Batch* batches_ = nullptr;  // a ring, in host memory that the GPU reads
  uint32_t* allowed_ = nullptr;     // in host memory: kernels up to this one may run
  uint32_t* done_ = nullptr;       // in host memory: the last kernel that is done
  uint32_t* over_ = nullptr;       // in host memory: the last collective that is done
  uint32_t* ready_ = nullptr;      // in host memory, by collective: its caller's stream has reached it
  uint32_t calls_ = 0;
  cuda::Pointer arrived_ = 0;
  uint64_t launched_ = 0;
  KernelShape shape_{};
  uint32_t rest_ = 0;
  // Of the collective under way.
  uint32_t begun_calls_ = 0;
  uint64_t limit_ = 0;  // the last kernel that may get a batch
  uint64_t last_ = 0;   // and the last of all
  uint64_t next_ = 1;   // the kernel that gets the next batch
  mutable uint64_t seen_done_ = 0;
  gpu::Batch batch_{};  // the one that is being put together
  std::vector<uint64_t> queues_;
};

}  // namespace sealring
