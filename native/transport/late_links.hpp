// Links that are made while a group's collectives may be running: any thread brings one, and the thread
// that runs collectives takes it.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "keys/keys.hpp"
#include "transport/pipe.hpp"

namespace sealring {

struct LateLink {
  int peer;
  std::unique_ptr<Pipe> pipe;
  KeyBytes send_key;
  KeyBytes receive_key;
};

class LateLinks {
 public:
  LateLinks();
  ~LateLinks();
  LateLinks(const LateLinks&) = delete;
  LateLinks& operator=(const LateLinks&) = delete;

  // False once the group has ended; the link is then closed.
  bool add(LateLink link);
  // Cheap enough to be asked in every round.
  bool waiting() const { return waiting_.load(std::memory_order_relaxed); }
  std::vector<LateLink> take();
  // No link is taken from here on; returns those that were not taken.
  std::vector<LateLink> close();
  // A descriptor that can be read while a link waits.
  int wake() const { return wake_; }

 private:
  std::mutex lock_;
  std::vector<LateLink> links_;
  std::atomic<bool> waiting_{false};
  bool closed_ = false;
  int wake_;
};

}  // namespace sealring
