// The lock that a thread holds while it runs a collective.
//
// While that thread waits for its peers, Python may run a signal handler on it. A function that the handler
// calls must not wait for a lock that its own thread holds, so it asks held_here() first.
#pragma once

#include <atomic>
#include <mutex>
#include <thread>

namespace sealring {

class RunLock {
 public:
  void lock() {
    mutex_.lock();
    owner_ = std::this_thread::get_id();
  }
  void unlock() {
    owner_ = std::thread::id();
    mutex_.unlock();
  }
  bool held_here() const { return owner_ == std::this_thread::get_id(); }

 private:
  std::mutex mutex_;
  std::atomic<std::thread::id> owner_;
};

}  // namespace sealring
