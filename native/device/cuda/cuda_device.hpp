// A GPU as the engine uses it. It has streams that compute, one stream that brings records in and one that
// takes them out, so sealing, opening and both directions of the bus overlap.
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
#include "device/cuda/exchanges.hpp"
#include "device/cuda/launch.hpp"
#include "device/cuda/persistent_kernel.hpp"
#include "device/cuda/prelaunched_kernels.hpp"
#include "device/device.hpp"
#include "record/record.hpp"

namespace sealring {

class CudaDevice : public Device {
 public:
  // `seal` and `open` are kernels of engine/cuda/kernels.cu, loaded in the device's primary context.
  CudaDevice(const cuda::Driver& driver, int ordinal, int world, uint64_t seal, uint64_t open);
  // Allows kernels to be launched ahead from now on. `run_one_batch` is for collectives that reduce nothing.
  void enable_prelaunch(uint64_t run_one_batch);
  // Allows streams to wait for messages from now on. `run_all_batches` is the persistent kernel.
  void enable_persistent_kernel(uint64_t run_all_batches);
  // The stream of the kernels that are launched ahead.
  uint64_t prelaunch_stream() const { return prelaunched_ != nullptr ? prelaunched_->stream() : 0; }
  ~CudaDevice() override;
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  struct Reduction {
    uint64_t open_reduce, reduce, average, premultiply, run_one_batch;
  };
  void add_reduction(DType dtype, ReduceKind kind, const Reduction& functions);

  // A thread that only writes commands needs no context.
  void enter() override {
    if (running_commands() == nullptr) make_current();
  }
  bool reached(uint64_t event) override;
  void reserve_pinned_memory(size_t bytes, size_t pieces) override;
  uint8_t* take_pinned_memory(size_t bytes) override;
  void free_pinned_memory(uint8_t* memory) override;
  size_t memory_bytes() const override;
  Area share(size_t bytes, std::vector<uint8_t>& handle) override;
  Area reach(std::span<const uint8_t> handle) override;
  Area reach_host(uint8_t* memory, size_t bytes) override;
  Area own_area(size_t bytes) override;
  std::vector<uint8_t> new_meeting_id(int world) override;
  void begin_meeting(std::span<const uint8_t> id, int rank, int world) override;
  void begin_connecting(const std::vector<int>& peers) override;
  bool exchanges_ready() override { return exchanges_->ready(); }
  void drop_exchanges() noexcept override { exchanges_.reset(); }
  void make_room(size_t payload) override;
  int add_key(const KeyBytes& key) override;
  void replace_key(int slot, const KeyBytes& key) override;
  void wipe() override;
  CommandQueue* command_queue() override { return commands_.get(); }
  Submitted submit(const Need& need) override;
  void launch_rest() override;
  void begin(const Setting& setting) override;
  void end() override;
  void abandon() noexcept override;
  uint8_t* scratch() const override {
    return prelaunched() ? setting_.submitted.scratch : reinterpret_cast<uint8_t*>(scratch_);
  }
  bool exchange(const Exchange& next) override { return exchanges_->allow(next); }
  uint64_t exchanged(size_t channel) override { return exchanges_->completed(channel); }
  bool has_room() const override {
    const CommandBatches* const commands = running_commands();
    return begun_ - settled_ < kRoom && (commands == nullptr || commands->has_room());
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

  // The place of a run of records in this device's own memory, until its ticket is settled.
  struct StagingSlot {
    cuda::Pointer record = 0;
    cuda::Handle copied = nullptr;  // the run has been copied in or out
    cuda::Handle computed = nullptr;  // a kernel has finished with the run
    cuda::Handle done = nullptr;  // the one of these two events to wait for
    uint64_t batch = 0;  // or the batch that contains its command
    bool opens = false;
  };

  void allocate_staging(size_t payload);
  void put_key(int slot, const KeyBytes& key);
  StagingSlot& next_staging_slot();
  cuda::Handle stream_of(uint64_t queue) const { return compute_[queue % kStreams]; }
  void run_kernel(cuda::Handle stream, uint64_t function, const Record& record,
                  cuda::Pointer sealed, bool opens, const uint8_t* local, uint8_t* result);
  // With commands (cuda_device_commands.cpp).
  bool prelaunched() const { return setting_.submitted.number != 0; }
  // The queue that commands go to; null if kernels are launched one by one.
  CommandBatches* running_commands() const {
    return commands_ && commands_->running() ? commands_.get() : nullptr;
  }
  Ticket command(uint64_t queue, gpu::Action action, const Record& record, const uint8_t* local,
                 uint8_t* result);
  void command_plain(uint64_t queue, gpu::Action action, uint8_t* into, const uint8_t* from,
                     size_t bytes, uint64_t argument = 0);
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
  mutable std::mutex adding_;  // reductions are added while collectives run
  std::map<std::pair<DType, ReduceKind>, Reduction> reductions_;
  Setting setting_{};
  cuda::Pointer staging_memory_ = 0;
  std::array<StagingSlot, kRoom> staging_;
  std::vector<cuda::Pointer> areas_, reached_;  // our own areas for wires, and the peers' areas
  std::vector<uint8_t*> registered_;
  std::unique_ptr<CudaExchanges> exchanges_;
  uint64_t* verdicts_ = nullptr;  // by slot, in host memory: kernels report bad records there
  std::unique_ptr<CommandBatches> commands_;
  PrelaunchedKernels* prelaunched_ = nullptr;  // set if `commands_` are prelaunched kernels
  std::mutex submitting_;
  uint64_t run_one_batch_ = 0;
  // For submitted collectives; the last block is the largest.
  std::vector<cuda::Pointer> scratches_;
  size_t scratches_bytes_ = 0;
  std::atomic<size_t> staging_bytes_{0};
  std::atomic<size_t> held_{0};  // for keys and verdicts
  mutable std::mutex pinned_lock_;
  std::multimap<size_t, uint8_t*> pinned_;  // free host memory, by size
  std::map<size_t, size_t> pinned_count_;  // by size: how many pieces were ever allocated
  gpu::KeyTable keys_;
  int key_count_ = 0;
  cuda::Pointer scratch_ = 0;
  size_t scratch_bytes_ = 0;
  Ticket begun_ = 0, settled_ = 0;
};

}  // namespace sealring
