#include "transport/inherited_sockets.hpp"

#include <pthread.h>
#include <unistd.h>

#include <mutex>
#include <set>

namespace sealring {
namespace {

struct Sockets {
  std::mutex mutex;
  std::set<int> open;
};

// Never destroyed: a fork may come while the process ends.
Sockets& sockets() {
  static Sockets* const the = [] {
    auto* const made = new Sockets;
    ::pthread_atfork([] { sockets().mutex.lock(); }, [] { sockets().mutex.unlock(); },
                     [] {
                       for (const int socket : sockets().open) ::close(socket);
                       sockets().open.clear();
                       sockets().mutex.unlock();
                     });
    return made;
  }();
  return *the;
}

}  // namespace

void close_in_children(int socket) {
  const std::lock_guard<std::mutex> lock(sockets().mutex);
  sockets().open.insert(socket);
}

void forget_in_children(int socket) {
  const std::lock_guard<std::mutex> lock(sockets().mutex);
  sockets().open.erase(socket);
}

}  // namespace sealring
