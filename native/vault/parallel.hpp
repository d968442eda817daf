// Shares independent pieces of work among threads, and keeps the memory that each thread works in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace sealring {

// The CPUs that this process may use.
size_t usable_cpus();

// Calls work(i) once for every i below `count`, on at most `threads` threads including this one. Returns when
// all calls are done. If one throws, no further call begins, and the first exception is rethrown. The caller
// must not hold the GIL.
void share_work(size_t count, size_t threads, const std::function<void(size_t)>& work);

// Memory that a thread keeps from one block to the next. While it is in use, a signal handler in Python may
// begin another read or write in the same thread; that one gets its own memory.
class Room {
 public:
  Room(std::vector<uint8_t>& kept, size_t bytes) : kept_(kept), own_(std::move(kept)) {
    if (own_.size() < bytes) own_.resize(bytes);
  }
  ~Room() { kept_ = std::move(own_); }
  Room(const Room&) = delete;
  Room& operator=(const Room&) = delete;

  uint8_t* data() { return own_.data(); }
  size_t size() const { return own_.size(); }

 private:
  std::vector<uint8_t>& kept_;
  std::vector<uint8_t> own_;
};

}  // namespace sealring
