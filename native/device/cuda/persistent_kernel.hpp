// The porter: a kernel that stays on the GPU while messages are under way, and does what it is told.
//
// Messages come in no order that ranks share, so a GPU cannot be given its part of one ahead, as it is
// with collectives (shifts.hpp). One kernel does it for all of them, from before the first until after
// the last. It is launched by whoever sends or receives, before any stream can wait for that message;
// so whoever moves the messages never has to call CUDA.
//
// A message has a number. Its caller's stream writes it when it has come to the call: the memory may be
// used from then on. And streams wait for it, until the message is done. None waits for another one's.
#pragma once

#include <bitset>
#include <cstdint>
#include <vector>

#include "device/cuda/command_queue.hpp"
#include "device/cuda/driver.hpp"

namespace sealring {

class Porter : public Commands {
 public:
  // In the calling thread's context. `function` is a kernel `carry`; `parts` are the blocks of threads
  // for one record, which a command has at most.
  Porter(const cuda::Driver& driver, uint64_t function, uint32_t parts);
  ~Porter() override;
  Porter(const Porter&) = delete;
  Porter& operator=(const Porter&) = delete;

  // Messages that may be under way at once.
  static constexpr uint32_t kNumbers = 4096;
  static size_t memory_bytes() { return kWords + 2 * kNumbers * sizeof(uint32_t); }
  uint32_t parts() const { return parts_; }

  // ---- by whoever sends or receives
  // Launches it, in the calling thread's context, when nothing is under way. CUDA may keep the caller
  // waiting.
  void launch() const;
  // From now on it is told what to do.
  void come_in();
  bool is_in() const { return in_; }
  // Whether one of this process's is: CUDA would wait for it where it waits until the GPU is idle.
  static bool any_is_in();
  // The next message's number, never 0; 0 when too many are under way.
  uint32_t take_number();
  // The stream will say when it has come here. CUDA may keep the caller waiting.
  void mark(cuda::Handle stream, uint32_t number) const;
  // What the stream is given from now on waits until the message is done.
  void hold(cuda::Handle stream, uint32_t number) const;
  bool is_over(uint32_t number) const;

  // ---- by whoever moves the messages
  bool has_come(uint32_t number) const;
  void let_go(uint32_t number);
  bool has_room() const override { return batch_.count < gpu::kCommands; }
  uint64_t add(uint64_t queue, const gpu::Command& command) override;
  void hand_over() override;
  void hand_over_now() override;
  // What there is: what is added next comes after it.
  void hand_over_all();
  // The same, and returns when it is done.
  void finish();
  bool done(uint64_t batch) const override;
  void abandon() override;
  // Hands over the rest, and that there will be no more. The kernel ends in its own time.
  void leave();

 private:
  static constexpr size_t kLine = 128;  // numbers have lines of their own
  static constexpr size_t kWords = (sizeof(gpu::Batch) + kLine - 1) / kLine * kLine + kLine;

  uint64_t handed_over() const { return next_ - 1; }
  void write_batch();
  void wait_until_done() const;

  const cuda::Driver& cuda_;
  const uint64_t function_;
  const uint32_t parts_;
  cuda::Handle stream_ = nullptr;
  cuda::Pointer arrived_ = 0;
  gpu::Batch* told_ = nullptr;  // in host memory that the GPU reads: the last batch
  uint32_t* done_ = nullptr;    // in host memory: the last batch that was obeyed
  uint32_t* come_ = nullptr;    // in host memory, by message: that its caller's stream has come to it
  uint32_t* over_ = nullptr;    // in host memory, by message: that it is done
  std::bitset<kNumbers> under_way_;
  uint32_t last_number_ = 0;
  bool in_ = false;
  uint64_t next_ = 1;  // the batch that will be handed over next
  gpu::Batch batch_{};  // as far as it has been put together
  std::vector<uint64_t> queues_;
};

}  // namespace sealring
