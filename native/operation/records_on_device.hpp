// The records that a device was given to seal or to open, in the order in which it finishes them.
#pragma once

#include <chrono>
#include <list>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "device/device.hpp"
#include "operation/completion.hpp"
#include "transport/farewell.hpp"

namespace sealring {

struct RecordOnDevice {
  Device::Ticket ticket;
  BufferRef record;
  int sender;  // the rank whose record is opened; -1: the record is sealed here
  std::vector<int> peers;  // where it is sent once it is sealed or found authentic
  // For a message's record:
  // the received message of which it is the last record
  std::shared_ptr<Completion> ends = nullptr;
  double timeout_s = 0;
  std::chrono::steady_clock::time_point moved{};
  // For a record that devices exchange: its round.
  std::optional<uint64_t> round = std::nullopt;
};

class RecordsOnDevice {
 public:
  bool empty() const { return records_.empty(); }
  const RecordOnDevice& oldest() const { return records_.front(); }
  void clear() { records_.clear(); }

  void push(Links& links, RecordOnDevice record) {
    if (record.sender < 0) {
      for (int peer : record.peers) ++links[peer]->promised;
    }
    records_.push_back(std::move(record));
  }

  // Sends or forwards the records that the device has finished, and calls `done` for each. True if there were
  // any. Records are handled in order, so nothing made after a bad record leaves this rank.
  template <typename Done>
  bool settle(Device& device, Links& links, Done done) {
    bool moved = false;
    for (; !records_.empty(); moved = true) {
      RecordOnDevice& record = records_.front();
      const Device::State state = device.settle(record.ticket);
      if (state == Device::State::pending) break;
      if (state == Device::State::refused) {
        throw Failure(FailureCode::tampered, record.sender,
                      "a record's payload was changed on the way");
      }
      if (record.sender >= 0) links[record.sender]->opened_by_device();
      for (int peer : record.peers) {
        if (record.sender < 0) --links[peer]->promised;
        links[peer]->enqueue(record.record);
      }
      done(record);
      records_.pop_front();
    }
    return moved;
  }

 private:
  std::list<RecordOnDevice> records_;  // a list, because an empty one allocates nothing
};

}  // namespace sealring
