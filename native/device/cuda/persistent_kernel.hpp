// One kernel that stays on the GPU while messages are under way, and runs batch after batch of commands.
//
// Ranks share no order of messages, so kernels cannot be launched ahead for each of them, as they are
// for collectives (prelaunched_kernels.hpp). The thread that sends or receives the first message launches
// this kernel, before any stream can wait for the message. The thread that moves messages never calls
// CUDA (command_queue.hpp). The kernel ends with the last message.
//
// A message has a number. The caller's stream writes it when it reaches the call; the memory may be used
// from then on. Streams wait for the number until the message is done. No message waits for another.
#pragma once

#include <bitset>
#include <cstdint>
#include <vector>

#include "device/cuda/command_queue.hpp"
#include "device/cuda/driver.hpp"

namespace sealring {

class PersistentKernel : public CommandQueue {
 public:
  // In the calling thread's context. `function` is a kernel `run_all_batches`; `parts` is the number of thread
  // blocks for one record, which is all that a command has.
  PersistentKernel(const cuda::Driver& driver, uint64_t function, uint32_t parts);
  ~PersistentKernel() override;
  PersistentKernel(const PersistentKernel&) = delete;
  PersistentKernel& operator=(const PersistentKernel&) = delete;

  // Messages that may be under way at once.
  static constexpr uint32_t kNumbers = 4096;
  static size_t memory_bytes() { return kWords + 2 * kNumbers * sizeof(uint32_t); }
  uint32_t parts() const { return parts_; }

  // ---- for threads that send or receive
  // Launches it, in the calling thread's context, when nothing is under way. CUDA may block the caller.
  void launch() const;
  // From now on commands may be added.
  void mark_running();
  bool running() const { return running_; }
  // Whether one runs in this process: CUDA calls that wait until the GPU is idle would wait for it.
  static bool any_running();
  // The next message's number, never 0; 0 when too many are under way.
  uint32_t take_number();
  // Has the stream write the number when it reaches this point. CUDA may block the caller.
  void mark(cuda::Handle stream, uint32_t number) const;
  // Later work in the stream waits until the message is done.
  void make_stream_wait(cuda::Handle stream, uint32_t number) const;
  bool is_done(uint32_t number) const;

  // ---- for the thread that moves messages
  bool stream_reached(uint32_t number) const;
  void release_waiters(uint32_t number);
  bool has_room() const override { return batch_.count < gpu::kCommands; }
  uint64_t add(uint64_t queue, const gpu::Command& command) override;
  void submit() override;
  void submit_now() override;
  // Submits what was added, if anything: a command that is added later runs after it.
  void submit_all();
  // The same, and returns when it is done.
  void finish();
  bool done(uint64_t batch) const override;
  void abandon() override;
  // Submits the rest and then the end. Does not wait for the kernel to end.
  void stop();

 private:
  static constexpr size_t kLine = 128;  // numbers have lines of their own
  static constexpr size_t kWords = (sizeof(gpu::Batch) + kLine - 1) / kLine * kLine + kLine;

  uint64_t submitted() const { return next_ - 1; }
  void write_batch();
  void wait_until_done() const;

  const cuda::Driver& cuda_;
  const uint64_t function_;
  const uint32_t parts_;
  cuda::Handle stream_ = nullptr;
  cuda::Pointer arrived_ = 0;
  gpu::Batch* batch_memory_ = nullptr;  // in host memory that the GPU reads: the last batch
  uint32_t* done_ = nullptr;    // in host memory: the last batch that is done
  uint32_t* reached_ = nullptr;    // in host memory, by message: its caller's stream has reached it
  uint32_t* over_ = nullptr;    // in host memory, by message: it is done
  std::bitset<kNumbers> under_way_;
  uint32_t last_number_ = 0;
  bool running_ = false;
  uint64_t next_ = 1;  // the batch that will be handed over next
  gpu::Batch batch_{};  // as far as it has been put together
  std::vector<uint64_t> queues_;
};

}  // namespace sealring
