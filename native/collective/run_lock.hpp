// Held by the thread that runs a collective.
//
// While that thread waits for its peers, Python may run the handler of a signal on it. What the handler calls
// must not wait for the lock, which its own thread has: it asks first.
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
