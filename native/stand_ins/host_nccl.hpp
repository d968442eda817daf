// NCCL played by this CPU: ranks are threads of one process, and what they send each other passes through
// its memory. As NCCL does, it takes its time to make a communicator, and waits for ranks that do not come.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "device/cuda/nccl.hpp"
#include "device/exchange.hpp"

namespace sealring {

// One rank's end of a meeting of all ranks.
class HostMeeting {
 public:
  enum class State { waiting, ready, aborted };
  static std::vector<uint8_t> new_id();
  // The next message that comes to this rank, in any meeting, is changed on the way.
  static void change_next_for(int rank);
  // Messages that left, in all meetings of this process, without those of one byte by which ranks connect.
  static uint64_t sent();

  HostMeeting() = default;
  HostMeeting(std::span<const uint8_t> id, int rank, int world);

  // Whether all have come.
  State settled() const;
  void send(const Transfer& transfer) const;
  // False while nothing has come. Throws if what came has another length.
  bool receive(const Transfer& transfer) const;
  // At this rank alone, as NCCL does.
  void abort();
  bool aborted() const { return aborted_ != nullptr && *aborted_; }

 private:
  struct Room;
  static std::shared_ptr<Room> find(std::span<const uint8_t> id);

  std::shared_ptr<Room> room_;
  std::shared_ptr<std::atomic<bool>> aborted_;
  int rank_ = 0, world_ = 0;
};

const nccl::Library& host_nccl();

}  // namespace sealring
