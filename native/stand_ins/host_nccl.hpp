// NCCL played by this CPU: ranks are threads of one process, and messages pass through its memory. Like NCCL,
// it makes a communicator in the background, and waits for ranks that do not come.
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
  // Changes the next message that comes to this rank, in any meeting.
  static void change_next_for(int rank);
  // How many messages were sent in all meetings of this process, without the one-byte messages by which ranks
  // connect.
  static uint64_t sent();

  HostMeeting() = default;
  HostMeeting(std::span<const uint8_t> id, int rank, int world);

  // Whether all ranks have come.
  State settled() const;
  void send(const Transfer& transfer) const;
  // Returns false while nothing has come. Throws if the message has another length.
  bool receive(const Transfer& transfer) const;
  // Aborts at this rank only, as NCCL does.
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
