// Independent pieces of work, shared among threads, and the memory that each works in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace sealring {

// The CPUs that this process may use.
size_t usable_cpus();

// Calls work(i) for every i below `count`, each once, on at most `threads` threads, of which this is
// one. Returns when all are done. Rethrows the first exception; work that had not begun is then left
// out. The caller must not hold the GIL.
void share_work(size_t count, size_t threads, const std::function<void(size_t)>& work);

// Memory that a thread keeps from one block to the next. What it calls meanwhile may begin another read
// or write in this thread, as a signal's handler in Python does: that one gets memory of its own.
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
