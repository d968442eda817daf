#include "vault/parallel.hpp"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace sealring {

size_t usable_cpus() {
  cpu_set_t set;
  if (::sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

void share_work(size_t count, size_t threads, const std::function<void(size_t)>& work) {
  std::atomic<size_t> next{0};
  std::mutex mutex;
  std::exception_ptr first;
  const auto take_part = [&] {
    try {
      for (size_t at = next.fetch_add(1); at < count; at = next.fetch_add(1)) work(at);
    } catch (...) {
      next.store(count);
      const std::lock_guard<std::mutex> lock(mutex);
      if (!first) first = std::current_exception();
    }
  };
  std::vector<std::thread> others;
  const size_t wanted = std::min(std::max<size_t>(threads, 1), count);
  others.reserve(wanted);
  while (others.size() + 1 < wanted) {
    try {
      others.emplace_back(take_part);
    } catch (const std::system_error&) {
      break;  // no more threads are allowed: the running ones do all the work
    }
  }
  take_part();
  for (std::thread& other : others) other.join();
  if (first) std::rethrow_exception(first);
}

}  // namespace sealring
