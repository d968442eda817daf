// A kernel that stays on the GPU while messages are under way, and runs batch after batch of commands
// (engine/cuda/persistent_kernel.hpp).
//
// Ranks do not agree on an order of messages, so kernels cannot be launched ahead for each message, as they
// are for collectives (prelaunched_kernels.hpp). The thread that sends or receives the first message launches
// this kernel, before any stream can wait for the message. The thread that moves messages never calls CUDA
// (device/command_queue.hpp). The kernel ends with the last message. No message waits for another.
#pragma once

#include "device/cuda/command_batches.hpp"

namespace sealring {

class PersistentKernel : public CommandBatches {
 public:
  // Called in the GPU's context. `function` is a kernel `run_all_batches`; `parts` is the number of thread
  // blocks for one record, and each command has one record.
  PersistentKernel(const gpu::Gpu& gpu, uint64_t function, uint32_t parts);
  ~PersistentKernel() override;

  void launch() const override;
  void mark_running() override;
  // Whether a persistent kernel runs in this process. CUDA calls that wait until the GPU is idle would wait
  // for it.
  static bool any_running();

  bool busy() const override { return running_; }
  bool has_room() const override { return batch_.count < gpu::kCommands; }
  void fail(const Submitted& operation,
            std::span<const std::span<uint8_t>> results) noexcept override;
  void stop(bool wipe_keys) override;

 private:
  const uint64_t function_;
};

}  // namespace sealring
