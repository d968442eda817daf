// Adds the time from its construction to its destruction to a counter.
#pragma once

#include <chrono>
#include <cstdint>

namespace sealring {

class Stopwatch {
 public:
  explicit Stopwatch(uint64_t& nanoseconds) : nanoseconds_(nanoseconds) {}
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;
  ~Stopwatch() {
    const std::chrono::nanoseconds passed = std::chrono::steady_clock::now() - started_;
    nanoseconds_ += static_cast<uint64_t>(passed.count());
  }

 private:
  uint64_t& nanoseconds_;
  const std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
};

}  // namespace sealring
