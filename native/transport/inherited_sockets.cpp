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

LinkSocket::LinkSocket(int socket) : socket_(socket) {
  try {
    const std::lock_guard<std::mutex> lock(sockets().mutex);
    sockets().open.insert(socket);
  } catch (...) {
    ::close(socket);
    throw;
  }
}

// Closes under the lock: once closed, the descriptor's number may belong to another file.
LinkSocket::~LinkSocket() {
  const std::lock_guard<std::mutex> lock(sockets().mutex);
  sockets().open.erase(socket_);
  ::close(socket_);
}

}  // namespace sealring
