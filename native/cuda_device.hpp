// A GPU as the engine uses it: streams that compute, one that brings records
// in and one that takes them out. So sealing, opening and both directions of the bus overlap.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "cuda_driver.hpp"
#include "device.hpp"
#include "nccl.hpp"
#include "record.hpp"

namespace sealring {

// Launches a kernel of one argument in the calling thread's context.
void cuda_launch(uint64_t function, uint32_t blocks, uint32_t threads, uint32_t cluster,
                 const void* argument, uint64_t stream);

class CudaDevice : public Device {
 public:
  // Kernels of engine/cuda/kernels.cu, loaded in the device's primary context.
  CudaDevice(int ordinal, int world, uint64_t seal, uint64_t open);
  ~CudaDevice() override;
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  struct Reduction {
    uint64_t open_reduce, reduce, average, premultiply;
  };
  void add_reduction(DType dtype, ReduceKind kind, const Reduction& functions);

  void enter() override { make_current(); }
  bool reached(uint64_t event) override;
  uint8_t* take_host_memory(size_t bytes) override;
  void give_host_memory(uint8_t* memory) override;
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
  void begin(const Setting& setting) override;
  void end() override;
  void abandon() noexcept override;
  uint8_t* scratch() const override { return reinterpret_cast<uint8_t*>(scratch_); }
  bool has_room() const override { return begun_ - settled_ < kRoom; }
  Ticket seal(uint64_t queue, const Record& record, const uint8_t* plain) override;
  Ticket open(uint64_t queue, const Record& record, uint8_t* into, bool reduces) override;
  State settle(Ticket ticket) override;
  void copy(uint64_t queue, uint8_t* into, const uint8_t* from, size_t bytes) override;
  void reduce(uint64_t queue, uint8_t* into, const uint8_t* from, size_t bytes) override;
  void average(uint64_t queue, uint8_t* into, size_t bytes) override;
  void premultiply(uint64_t queue, uint8_t* into, size_t bytes) override;

 private:
  static constexpr uint64_t kRoom = 32;
  static constexpr size_t kStreams = 8;
  static constexpr size_t kSharedBlock = 2u << 20;

  // A run's place in this device's own memory, while a ticket is not settled.
  struct Berth {
    cuda::Pointer record = 0;
    cuda::Handle copied = nullptr;    // it has been copied in or out
    cuda::Handle computed = nullptr;  // a kernel is done with it
    cuda::Handle done = nullptr;      // one of the two: the one to wait for
    bool opens = false;
  };

  void allocate_berths(size_t payload);
  void put_key(int slot, const KeyBytes& key);
  // CUDA shares whole blocks with other processes. What is shared must fill its own, and what must
  // not be must not lie in one that anybody else in this process may share.
  static size_t whole_blocks(size_t bytes) { return (bytes + kSharedBlock - 1) / kSharedBlock * kSharedBlock; }
  Berth& next_berth();
  cuda::Handle stream_of(uint64_t queue) const { return compute_[queue % kStreams]; }
  void run_kernel(cuda::Handle stream, uint64_t function, const Record& record,
                  cuda::Pointer sealed, bool opens, const uint8_t* local, uint8_t* result);
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
  cuda::Pointer berth_memory_ = 0;
  std::array<Berth, kRoom> berths_;
  std::vector<cuda::Pointer> areas_, reached_;  // ours for wires, and peers'
  std::vector<uint8_t*> registered_;
  std::vector<std::unique_ptr<nccl::Channel>> channels_;
  uint64_t* verdicts_ = nullptr;  // by berth, in host memory: kernels write there what was bad
  cuda::Pointer keys_ = 0;
  int key_slots_ = 0, key_count_ = 0;
  cuda::Pointer scratch_ = 0;
  size_t scratch_bytes_ = 0;
  Ticket begun_ = 0, settled_ = 0;
};

}  // namespace sealring
