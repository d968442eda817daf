// Independent pieces of work, shared among threads.
#pragma once

#include <cstddef>
#include <functional>

namespace sealring {

// The CPUs that this process may use.
size_t usable_cpus();

// Calls work(i) for every i below `count`, each once, on at most `threads` threads, of which this is
// one. Returns when all are done. Rethrows the first exception; work that had not begun is then left
// out. The caller must not hold the GIL.
void share_work(size_t count, size_t threads, const std::function<void(size_t)>& work);

}  // namespace sealring
