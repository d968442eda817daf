// A device played by this CPU with the GPU's arithmetic, so that a collective on a device can be run, and
// attacked, on a machine without a GPU. Its memory is the process's memory.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "device/device.hpp"
#include "stand_ins/host_nccl.hpp"

namespace sealring {

// With it a test watches a device that an engine owns, and makes it fail.
struct HostDeviceProbe : std::enable_shared_from_this<HostDeviceProbe> {
  bool broken = false;
  // The work that the device was given: "seal 4096", "open 4096", "open_reduce 4096", "copy 64", ...
  std::vector<std::string> log;
};

class HostDevice : public Device {
 public:
  // A ticket is pending until settle() was called for it more than `lag` times.
  HostDevice(int lag, int world,
             std::shared_ptr<HostDeviceProbe> probe = std::make_shared<HostDeviceProbe>())
      : lag_(lag), key_slots_(keys_of_group(world)), probe_(std::move(probe)) {}

  void enter() override {}
  // An event is a number here: how many calls return false before it is reached.
  bool reached(uint64_t event) override { return ++asked_about_[event] > event; }
  void reserve_pinned_memory(size_t, size_t) override {}
  uint8_t* take_pinned_memory(size_t bytes) override;
  void free_pinned_memory(uint8_t* memory) override;
  size_t memory_bytes() const override { return 0; }
  // The peers are in the same process, so a handle is an address.
  Area share(size_t bytes, std::vector<uint8_t>& handle) override;
  Area reach(std::span<const uint8_t> handle) override;
  Area reach_host(uint8_t* memory, size_t) override { return {memory}; }
  Area own_area(size_t bytes) override;
  std::vector<uint8_t> new_meeting_id(int world) override;
  void begin_meeting(std::span<const uint8_t> id, int rank, int world) override;
  void begin_connecting(const std::vector<int>&) override {}
  bool exchanges_ready() override { return meeting_.settled() != HostMeeting::State::waiting; }
  void drop_exchanges() noexcept override { meeting_.abort(); }
  bool exchange(const Exchange& next) override;
  uint64_t exchanged(size_t channel) override;
  void make_room(size_t) override {}
  int add_key(const KeyBytes& key) override;
  void replace_key(int slot, const KeyBytes& key) override;
  void wipe() override { keys_.clear(); }
  void begin(const Setting& setting) override;
  void end() override {}
  void abandon() noexcept override { unsettled_.clear(); }
  uint8_t* scratch() const override { return const_cast<uint8_t*>(scratch_.data()); }
  bool has_room() const override { return unsettled_.size() < kRoom; }
  Ticket seal(uint64_t, const Record& record, const uint8_t* plain) override;
  Ticket open(uint64_t, const Record& record, uint8_t* into, bool reduces) override;
  State settle(Ticket ticket) override;
  void copy(uint64_t, uint8_t* into, const uint8_t* from, size_t bytes) override;
  void reduce(uint64_t, uint8_t* into, const uint8_t* from, size_t bytes) override;
  void average(uint64_t, uint8_t* into, size_t bytes) override;
  void premultiply(uint64_t, uint8_t* into, size_t bytes) override;

 private:
  static constexpr size_t kRoom = 8;
  struct Unsettled {
    Ticket ticket;
    State outcome;
    int asked = 0;
  };
  Ticket give(const char* what, size_t bytes, State outcome);
  bool open_run(const Record& record, std::vector<uint8_t>& plain) const;

  const int lag_, key_slots_;
  std::vector<KeyBytes> keys_;
  Setting setting_{};
  std::vector<uint8_t> scratch_;
  std::vector<std::unique_ptr<uint8_t[]>> shared_;
  HostMeeting meeting_;
  std::map<size_t, std::deque<Exchange>> exchanges_;  // by channel: exchanges that have begun
  std::map<size_t, uint64_t> exchanged_;
  std::deque<Unsettled> unsettled_;
  Ticket next_ = 0;
  std::map<uint64_t, uint64_t> asked_about_;
  const std::shared_ptr<HostDeviceProbe> probe_;
};

}  // namespace sealring
