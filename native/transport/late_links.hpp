// Links made while a group's collectives may be running. Any thread adds a link; the thread that runs
// collectives takes it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "keys/keys.hpp"
#include "record/record.hpp"
#include "transport/pipe.hpp"

namespace sealring {

struct LateLink {
  int peer;
  std::unique_ptr<Pipe> pipe;
  KeyBytes send_key;
  KeyBytes receive_key;
};

// The record with which a group ended: an alert or a bye.
struct LastWord {
  Kind kind;
  std::vector<uint8_t> payload;
};

class LateLinks {
 public:
  LateLinks();
  ~LateLinks();
  LateLinks(const LateLinks&) = delete;
  LateLinks& operator=(const LateLinks&) = delete;

  // Takes the link. Once the group has ended, leaves the link and returns what its peer must be told.
  std::optional<LastWord> add(LateLink& link);
  // Cheap enough to call in every round.
  bool waiting() const { return waiting_.load(std::memory_order_relaxed); }
  std::vector<LateLink> take();
  // No link is added from here on; returns those that were not taken.
  std::vector<LateLink> close(LastWord word);
  // A descriptor that can be read while a link waits, and after ring() until hear() or take().
  int wake() const { return wake_; }
  void ring() const;
  void hear() const;

 private:
  std::mutex lock_;
  std::vector<LateLink> links_;
  std::atomic<bool> waiting_{false};
  std::optional<LastWord> closed_;
  int wake_;
};

}  // namespace sealring
