// The command queue of a GPU: commands go in batches to pinned host memory, which kernels read.
//
// This class has what the two strategies share: how batches are built and handed over, the numbers that
// streams write and wait for, and how keys are replaced between batches.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "device/command_queue.hpp"
#include "device/cuda/driver.hpp"
#include "device/cuda/launch.hpp"
#include "keys/keys.hpp"

namespace sealring {

class CommandBatches : public CommandQueue {
 public:
  // Called in the GPU's context. The memory holds `ring` batches; the GPU gets at most `ahead` of them at
  // once. The key slot after the group's keys belongs to this queue.
  CommandBatches(const gpu::Gpu& gpu, uint32_t ring, uint32_t ahead);
  ~CommandBatches() override;
  CommandBatches(const CommandBatches&) = delete;
  CommandBatches& operator=(const CommandBatches&) = delete;

  size_t memory_bytes() const;
  // Thread blocks for one record.
  uint32_t parts() const { return parts_; }

  uint32_t take_number() override;
  void mark_reached(uint64_t stream, uint32_t number) const override;
  void wait_on_stream(uint64_t stream, uint32_t number) const override;
  bool done(uint32_t number) const override;
  bool running() const override { return running_; }
  bool reached(uint32_t number) const override;
  void release_waiters(uint32_t number) override;

  // Whether another command can be added without waiting.
  virtual bool has_room() const = 0;
  // Commands of one queue run one after the other; commands of different queues may run together. Returns the
  // number of the command's batch.
  uint64_t add(uint64_t queue, const gpu::Command& command);
  // Submits the added commands, unless the GPU has enough work.
  void submit();
  bool batch_done(uint64_t batch) const;
  // Drops the commands that were not submitted; returns when all others are done.
  void abandon();
  // Replaces a key for commands that are added later. The group must have settled earlier commands that use
  // it. If the GPU cannot open the record that carries the key, the old key stays, and later records do not
  // open.
  void replace_key(int slot, const KeyBytes& key);
  // Called when the group has ended: no key is replaced any more.
  void wipe_wrapping_key();
  // Whether the GPU was told to wipe the group's keys.
  bool keys_wiped() const { return keys_wiped_; }

 protected:
  // Called when a batch is in the ring: kernels may be told.
  virtual void handed_over(uint64_t /*batch*/) {}

  uint64_t submitted() const { return next_ - 1; }
  // Submits the added commands, if any: a command that is added later runs after them.
  void submit_all();
  void submit_now();
  // Like submit_all(), but returns when all submitted commands are done.
  void finish();
  void poison(std::span<const std::span<uint8_t>> results, bool wipe_keys);
  void wait_for_value(cuda::Handle stream, const uint32_t* word, uint32_t value) const;
  gpu::BatchArgument argument_of(uint64_t batch, uint32_t blocks) const;
  const uint32_t* reached_word(uint32_t number) const { return &reached_[number % kNumbers]; }
  const uint32_t* done_word(uint32_t number) const { return &over_[number % kNumbers]; }

  // Lets the calling thread make CUDA calls for this GPU.
  void enter() const { cuda::check(cuda_.set_current(gpu_.context), "cuCtxSetCurrent"); }

  const gpu::Gpu gpu_;
  const cuda::Driver& cuda_ = gpu_.driver;
  cuda::Handle stream_ = nullptr;
  uint32_t* allowed_ = nullptr;  // in host memory: prelaunched kernels up to this one may run
  bool running_ = false;
  uint32_t parts_ = 1;
  uint64_t next_ = 1;  // the batch that will be handed over next
  uint64_t skipped_ = 0;  // batches up to this one were never written, or are done
  uint32_t begun_ = 0;  // the operation under way; 0 if there may be many
  uint64_t limit_ = UINT64_MAX;  // the last batch that may be handed over
  gpu::Batch batch_{};  // the batch that is being built

 private:
  static constexpr size_t kLine = 128;  // each word has its own cache line
  static constexpr size_t kWrappedStride = 256;
  static_assert(kRecordOverhead + kKeyBytes <= kWrappedStride);

  void allocate();
  void release() noexcept;
  size_t words_bytes() const;
  size_t wrapped_bytes() const { return static_cast<size_t>(keys_.slots) * kWrappedStride; }
  void wait_until_done(uint64_t batch) const;

  const gpu::KeyTable& keys_ = gpu_.keys;
  const uint32_t ring_, ahead_;
  cuda::Pointer arrived_ = 0;
  // Host memory that streams and kernels read and write. A stream may reach a wait long after its group has
  // ended, so this memory is never freed: the next group takes it over and continues the numbers.
  uint8_t* words_ = nullptr;
  uint32_t* done_ = nullptr;  // the last batch that is done
  uint64_t* failed_ = nullptr;  // where a key's command reports a bad tag
  uint32_t* reached_ = nullptr;  // by number: the caller's stream has reached the operation
  uint32_t* over_ = nullptr;  // by number: the operation is done
  gpu::Batch* batches_ = nullptr;
  uint32_t last_number_ = 0;
  std::array<uint32_t, kNumbers> taken_{};  // by place: the last number that used it
  std::vector<uint64_t> queues_;  // of the commands in `batch_`
  // While the GPU works, keys reach it as records sealed under this queue's own key, because they pass
  // through host memory, which is no memory for keys.
  std::unique_ptr<SealingKey> wrapping_;
  uint8_t* wrapped_ = nullptr;  // in host memory, by slot
  bool keys_wiped_ = false;
  cuda::Pointer unwrapping_ = 0;  // where the GPU first copies these records, by slot
};

}  // namespace sealring
