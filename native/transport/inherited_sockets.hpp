// Connections that a forked child must not keep open.
//
// A connection ends only when all processes that have it have closed it. A child that lives on (a data
// loader's worker) would keep its parent's peers from seeing that the parent is gone.
#pragma once

namespace sealring {

// Owns a link's connection, also before the group takes the link. fork() closes it in the child; a fork by a
// bare system call, which runs no handlers, does not.
class LinkSocket {
 public:
  explicit LinkSocket(int socket);
  ~LinkSocket();
  LinkSocket(const LinkSocket&) = delete;
  LinkSocket& operator=(const LinkSocket&) = delete;
  operator int() const { return socket_; }

 private:
  const int socket_;
};

}  // namespace sealring
