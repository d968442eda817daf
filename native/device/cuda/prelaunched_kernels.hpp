// Shifts: a GPU's part of a collective, launched before it is known what it will be.
//
// Whoever works for a collective that streams wait for must not need CUDA's driver (commands.hpp).
// The caller launches kernels ahead, each behind a wait for its number (engine/cuda/shifts.hpp); the
// group's thread only writes to memory: commands, in batches, and how far the kernels may go.
//
// Where several processes share a GPU they get it in turns, and one that has two streams waiting keeps
// it for its whole turn (docs/performance.md).
#pragma once

#include <cstdint>
#include <vector>

#include "device/cuda/command_queue.hpp"
#include "device/cuda/driver.hpp"

namespace sealring {

class Shifts : public Commands {
 public:
  // In the calling thread's context.
  explicit Shifts(const cuda::Driver& driver);
  ~Shifts() override;
  Shifts(const Shifts&) = delete;
  Shifts& operator=(const Shifts&) = delete;

  // In host memory: those numbers, and the batches of commands.
  static size_t memory_bytes() { return kWords + kBatches * sizeof(gpu::Batch); }

  // In host memory, for streams to wait for (lasting_numbers.hpp).
  struct Numbers {
    uint8_t* memory = nullptr;
    uint32_t calls = 0;
    uint64_t launched = 0;
  };

  // ---- by whoever calls collectives, one at a time, in the order in which they will be run
  struct Crew {
    uint64_t function;  // a kernel `serve`
    uint32_t parts;     // blocks of threads for one record
    uint32_t blocks;    // and for one command
  };
  // Launches `count` of them behind what the caller's stream was given, or as many as CUDA takes before
  // any of them is done; returns the first one's number.
  uint64_t launch(const Crew& crew, uint32_t count, cuda::Handle after);
  // Launches the rest, when the collective is on its way.
  void launch_rest();
  // What comes in it after them comes after all that they were told to do.
  cuda::Handle stream() const { return stream_; }
  // From here on a collective's caller has it: the number to wait for.
  uint32_t mark_over();
  void hold(cuda::Handle stream, uint32_t over) const;
  bool is_over(uint32_t over) const;

  // ---- by the group's thread: one collective after the other
  // `kept` more follow, for what must be done if it fails.
  void begin(uint64_t first, uint32_t count, uint32_t kept);
  // From now on those are for use, too.
  void use_kept() { limit_ = last_; }
  bool has_room() const override;
  uint64_t add(uint64_t queue, const gpu::Command& command) override;
  void hand_over() override;
  void hand_over_now() override;
  bool done(uint64_t shift) const override;
  void abandon() override;
  // Hands over all; returns when it is done. The shifts that are left have nothing to do.
  void end();

 private:
  static constexpr uint64_t kBatches = 32;
  static constexpr uint64_t kBusy = 2;  // batches: one that is obeyed, and the next
  // More collectives than CUDA's queues hold. Streams come to theirs in any order.
  static constexpr uint32_t kCalls = 1024;
  static constexpr size_t kLine = 128;  // numbers have lines of their own
  static constexpr size_t kWords = 3 * kLine + kCalls * sizeof(uint32_t);

  uint64_t handed_over() const { return next_ - 1; }
  uint64_t done() const;
  void wait_until_done();
  void let_by(uint64_t shift);
  void wait(cuda::Handle stream, const uint32_t* number, uint32_t value) const;
  void launch_some(uint32_t count);

  const cuda::Driver& cuda_;
  cuda::Handle stream_ = nullptr;
  gpu::Batch* batches_ = nullptr;  // a ring, in host memory that the GPU reads
  uint32_t* let_by_ = nullptr;     // in host memory: shifts up to this one go on
  uint32_t* done_ = nullptr;       // in host memory: the last one that obeyed
  uint32_t* over_ = nullptr;       // in host memory: the last collective that is
  uint32_t* ready_ = nullptr;      // in host memory, by collective: that its caller's stream has come to it
  uint32_t calls_ = 0;
  cuda::Pointer arrived_ = 0;
  uint64_t launched_ = 0;
  Crew crew_{};
  uint32_t rest_ = 0;
  // Of the collective under way.
  uint32_t begun_calls_ = 0;
  uint64_t limit_ = 0;  // the last shift that may get a batch
  uint64_t last_ = 0;   // and the last of all
  uint64_t next_ = 1;   // the shift that gets the next batch
  mutable uint64_t seen_done_ = 0;
  gpu::Batch batch_{};  // the one that is being put together
  std::vector<uint64_t> queues_;
};

}  // namespace sealring
