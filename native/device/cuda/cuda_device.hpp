// A GPU as the engine uses it: streams that compute, one that brings records
// in and one that takes them out. So sealing, opening and both directions of the bus overlap.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "device/cuda/driver.hpp"
#include "device/device.hpp"
#include "device/cuda/launch.hpp"
#include "device/cuda/nccl.hpp"
#include "device/cuda/persistent_kernel.hpp"
#include "record/record.hpp"
#include "device/cuda/prelaunched_kernels.hpp"

namespace sealring {

class CudaDevice : public Device {
 public:
  // Kernels of engine/cuda/kernels.cu, loaded in the device's primary context.
  CudaDevice(const cuda::Driver& driver, int ordinal, int world, uint64_t seal, uint64_t open);
  // From now on kernels can be launched ahead. `run_one_batch` is for collectives that reduce nothing.
  void enable_prelaunch(uint64_t run_one_batch);
  // From now on streams can wait for messages. `run_all_batches` is the persistent kernel.
  void enable_persistent_kernel(uint64_t run_all_batches);
  // The stream of the kernels that are launched ahead.
  uint64_t prelaunch_stream() const {
    return prelaunched_ ? reinterpret_cast<uint64_t>(prelaunched_->stream()) : 0;
  }
  ~CudaDevice() override;
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  // Marks the end of the last prepared collective in its stream; returns the number to wait for.
  uint32_t mark_end();
  void make_stream_wait(uint64_t stream, uint32_t over) const;
  bool is_done(uint32_t over) const;

  struct Reduction {
    uint64_t open_reduce, reduce, average, premultiply, run_one_batch;
  };
  void add_reduction(DType dtype, ReduceKind kind, const Reduction& functions);

  // A thread that only writes commands needs no context.
  void enter() override {
    if (command_queue() == nullptr) make_current();
  }
  PersistentKernel* persistent_kernel() override { return persistent_kernel_.get(); }
  void poison_message(std::span<uint8_t> result) noexcept override;
  void stop_persistent_kernel() noexcept override;
  bool reached(uint64_t event) override;
  void reserve_pinned_memory(size_t bytes, size_t pieces) override;
  uint8_t* take_pinned_memory(size_t bytes) override;
  void free_pinned_memory(uint8_t* memory) override;
  size_t memory_bytes() const override;
  Area share(size_t bytes, std::vector<uint8_t>& handle) override;
  Area reach(std::span<const uint8_t> handle) override;
  Area reach_host(uint8_t* memory, size_t bytes) override;
  Area own_area(size_t bytes) override;
  std::vector<uint8_t> new_channel_id() override;
  int open_channel(std::span<const uint8_t> id, bool sends) override;
  void make_room(size_t payload) override;
  int add_key(const KeyBytes& key) override;
  void replace_key(int slot, const KeyBytes& key) override;
  void wipe() override;
  Prepared prepare(const Need& need) override;
  void launch_rest() override;
  bool at_rest() const override { return unfinished_ == 0; }
  void begin(const Setting& setting) override;
  void end() override;
  void abandon() noexcept override;
  void poison_results(const Prepared& prepared, std::span<const std::span<uint8_t>> results) noexcept override;
  uint8_t* scratch() const override {
    return prepared() ? setting_.prepared.scratch : reinterpret_cast<uint8_t*>(scratch_);
  }
  bool has_room() const override {
    return begun_ - settled_ < kRoom && (command_queue() == nullptr || command_queue()->has_room());
  }
  Ticket seal(uint64_t queue, const Record& record, const uint8_t* plain) override;
  Ticket open(uint64_t queue, const Record& record, uint8_t* into, bool reduces) override;
  State settle(Ticket ticket) override;
  void copy(uint64_t queue, uint8_t* into, const uint8_t* from, size_t bytes) override;
  void reduce(uint64_t queue, uint8_t* into, const uint8_t* from, size_t bytes) override;
  void average(uint64_t queue, uint8_t* into, size_t bytes) override;
  void premultiply(uint64_t queue, uint8_t* into, size_t bytes) override;

 private:
  static constexpr uint64_t kRoom = 32;
  static constexpr uint64_t kNothingFailed = ~0ull;
  static constexpr size_t kStreams = 8;
  static constexpr size_t kSharedBlock = 2u << 20;
  static constexpr size_t kWrappedStride = 256;
  static_assert(kRecordOverhead + kKeyBytes <= kWrappedStride);

  // A run's place in this device's own memory, while a ticket is not settled.
  struct StagingSlot {
    cuda::Pointer record = 0;
    cuda::Handle copied = nullptr;    // it has been copied in or out
    cuda::Handle computed = nullptr;  // a kernel is done with it
    cuda::Handle done = nullptr;      // one of the two: the one to wait for
    uint64_t batch = 0;               // or the batch of commands that it is in
    bool opens = false;
  };

  void allocate_staging(size_t payload);
  void put_key(int slot, const KeyBytes& key);
  // The group's, and the device's own.
  size_t key_bytes() const { return static_cast<size_t>(key_slots_ + 1) * kKeyBytes; }
  // CUDA shares whole blocks with other processes. What is shared must fill its own, and what must
  // not be must not lie in one that anybody else in this process may share.
  static size_t whole_blocks(size_t bytes) { return (bytes + kSharedBlock - 1) / kSharedBlock * kSharedBlock; }
  StagingSlot& next_staging_slot();
  cuda::Handle stream_of(uint64_t queue) const { return compute_[queue % kStreams]; }
  gpu::Launch launch_of(const Record& record, cuda::Pointer sealed, bool opens,
                        const uint8_t* local, uint8_t* result, uint32_t parts) const;
  void run_kernel(cuda::Handle stream, uint64_t function, const Record& record,
                  cuda::Pointer sealed, bool opens, const uint8_t* local, uint8_t* result);
  // With commands (cuda_shifts.cpp).
  bool prepared() const { return setting_.prepared.commands != 0; }
  // Where commands go; null where kernels are launched.
  CommandQueue* command_queue() const {
    if (prepared()) return prelaunched_.get();
    return persistent_kernel_ && persistent_kernel_->running() ? persistent_kernel_.get() : nullptr;
  }
  uint32_t parts_of_command() const {
    return prepared() ? gpu::parts_of(std::min(setting_.segment_bytes, kGpuPayload)) : persistent_kernel_->parts();
  }
  void make_wrapping();
  Ticket command(uint64_t queue, gpu::Action action, const Record& record, const uint8_t* local,
                 uint8_t* result);
  void command_plain(uint64_t queue, gpu::Action action, uint8_t* into, const uint8_t* from,
                     size_t bytes, uint64_t argument = 0);
  void command_key(int slot, const KeyBytes& key);
  void leave() noexcept;
  void run_plain(cuda::Handle stream, uint64_t function, void** arguments, size_t bytes);
  void make_current() const;
  void release() noexcept;
  Reduction reduction() const;

  const cuda::Driver& cuda_;
  const int ordinal_;
  const uint64_t seal_, open_;
  cuda::Handle context_ = nullptr;
  std::array<cuda::Handle, kStreams> compute_{};
  cuda::Handle in_ = nullptr, out_ = nullptr;
  mutable std::mutex adding_;  // reductions and channels are added while collectives run or end
  std::map<std::pair<DType, ReduceKind>, Reduction> reductions_;
  Setting setting_{};
  cuda::Pointer staging_memory_ = 0;
  std::array<StagingSlot, kRoom> staging_;
  std::vector<cuda::Pointer> areas_, reached_;  // ours for wires, and peers'
  std::vector<uint8_t*> registered_;
  std::vector<std::unique_ptr<nccl::Channel>> channels_;
  uint64_t* verdicts_ = nullptr;  // by slot, in host memory: kernels write there what was bad
  std::unique_ptr<PrelaunchedKernels> prelaunched_;
  std::unique_ptr<PersistentKernel> persistent_kernel_;
  std::mutex preparing_;
  uint64_t run_one_batch_ = 0;
  std::vector<cuda::Pointer> scratches_;  // for prepared collectives; the last one is the largest
  size_t scratches_bytes_ = 0;
  std::atomic<size_t> staging_bytes_{0};
  std::atomic<size_t> held_{0};  // for keys and their wrapping, and verdicts
  mutable std::mutex pinned_lock_;
  std::multimap<size_t, uint8_t*> pinned_;  // host memory that is free, by size
  std::map<size_t, size_t> pinned_count_;       // pieces of a size that there ever were
  // Keys reach a GPU at work as records under a key of the device's own: host memory that it reads is
  // not memory for keys.
  std::unique_ptr<SealingKey> wrapping_;
  uint8_t* wrapped_ = nullptr;         // in host memory, by slot
  cuda::Pointer unwrapping_ = 0;       // where the GPU copies them to first, by slot
  std::atomic<uint64_t> unfinished_{0};  // collectives that are prepared and not over
  uint64_t over_ = 0;                    // the last one done, by the number of its first kernel
  bool poisoned_ = false;                  // and the keys are gone
  cuda::Pointer keys_ = 0;
  int key_slots_ = 0, key_count_ = 0;
  cuda::Pointer scratch_ = 0;
  size_t scratch_bytes_ = 0;
  Ticket begun_ = 0, settled_ = 0;
};

}  // namespace sealring
