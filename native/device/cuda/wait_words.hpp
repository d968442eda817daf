// Words of pinned host memory that streams wait for.
//
// A stream may reach a wait long after its group has ended. So the memory is never freed: the next group
// takes it over and counts on from where the last one was.
#pragma once

#include <cstdint>
#include <cstring>
#include <mutex>
#include <vector>

#include "device/cuda/driver.hpp"

namespace sealring {

// `Numbers` has `memory`, null at first, and the last numbers used.
template <typename Numbers>
class WaitWords {
 public:
  // The words of a group that has ended, or new ones, all zeros.
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

  static void give_back(const Numbers& numbers) {
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
