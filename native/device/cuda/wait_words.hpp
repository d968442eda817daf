// Host memory with numbers that streams wait for. A stream may come to a wait long after its group has
// gone: so the memory stays, and the next group that needs some counts on.
#pragma once

#include <cstdint>
#include <cstring>
#include <mutex>
#include <vector>

#include "device/cuda/driver.hpp"

namespace sealring {

// `Numbers` has `memory`, null at first, and where the counting is.
template <typename Numbers>
class LastingNumbers {
 public:
  // What a group that is gone has left, or new memory, all zeros.
  static Numbers take(const cuda::Driver& driver, size_t bytes) {
    {
      const std::lock_guard<std::mutex> lock(unused().lock);
      if (!unused().all.empty()) {
        const Numbers numbers = unused().all.back();
        unused().all.pop_back();
        return numbers;
      }
    }
    void* memory = nullptr;
    cuda::check(driver.allocate_host(&memory, bytes, cuda::kPortable), "cuMemHostAlloc");
    std::memset(memory, 0, bytes);
    Numbers numbers;
    numbers.memory = static_cast<uint8_t*>(memory);
    return numbers;
  }

  static void leave(const Numbers& numbers) {
    const std::lock_guard<std::mutex> lock(unused().lock);
    unused().all.push_back(numbers);
  }

 private:
  struct Unused {
    std::mutex lock;
    std::vector<Numbers> all;
  };
  static Unused& unused() {
    static Unused& made = *new Unused;  // never destroyed
    return made;
  }
};

}  // namespace sealring
