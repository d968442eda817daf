// Kernels for a collective, launched before its commands are known.
//
// A collective's caller launches as many kernels as the collective can need. Each kernel waits in the stream
// for its number (engine/cuda/prelaunched_kernel.hpp). The group's thread then hands over batches of commands
// and counts that number up; it makes no CUDA call (device/command_queue.hpp). A kernel whose number is
// reached without a batch returns at once.
//
// Processes that share a GPU get it in time slices, and a process with two waiting streams keeps it for
// the whole of its slice (docs/performance.md).
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

#include "device/cuda/command_batches.hpp"

namespace sealring {

class PrelaunchedKernels : public CommandBatches {
 public:
  // Called in the GPU's context.
  explicit PrelaunchedKernels(const gpu::Gpu& gpu);
  ~PrelaunchedKernels() override;

  // ---- for the callers of collectives, one at a time, in the order in which these will be run
  struct KernelShape {
    uint64_t function;  // a kernel `run_one_batch`
    uint32_t parts;  // thread blocks for one record
    uint32_t blocks;  // thread blocks for one command
  };
  // Launches `commands` + `spare` kernels after the work of the caller's stream, or as many of them as CUDA's
  // queue takes.
  Submitted launch(const KernelShape& shape, uint32_t commands, uint32_t spare, uint64_t after);
  // launch_up_to() launches the last collective's kernels up to this number of them; launch_rest() launches
  // all.
  void launch_up_to(uint32_t count);
  void launch_rest();
  void mark_end(uint32_t number) override;
  // The stream of the kernels. Later work in it runs after their commands.
  uint64_t stream() const { return reinterpret_cast<uint64_t>(stream_); }

  // ---- for the group's thread: one collective after the other
  void begin(const Submitted& operation, uint32_t parts);
  bool busy() const override { return unfinished_ != 0; }
  bool has_room() const override;
  void fail(const Submitted& operation,
            std::span<const std::span<uint8_t>> results) noexcept override;
  // Submits all commands and returns when they are done. The kernels that are left return at once.
  void end();

 private:
  static constexpr uint32_t kRing = 32;
  static constexpr uint32_t kAhead = 2;  // the batch that runs, and the next

  void handed_over(uint64_t batch) override { allow_up_to(batch); }
  void allow_up_to(uint64_t kernel);
  void launch_some(uint32_t count);

  std::mutex launching_;
  uint64_t launched_;
  KernelShape shape_{};
  uint32_t total_ = 0;  // how many kernels the last collective has
  uint32_t rest_ = 0;  // how many of them are not launched yet
  std::atomic<uint64_t> unfinished_{0};  // collectives that were launched and have not ended
  // About the collective under way:
  uint64_t first_ = 0;
  uint64_t last_ = 0;  // its last kernel
  uint64_t ended_ = 0;  // the last kernel of the last collective that has ended
};

}  // namespace sealring
