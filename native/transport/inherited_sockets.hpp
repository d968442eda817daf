// Connections that a forked child must not keep open.
//
// A connection ends when all processes that have it have closed it. A child that merely lives on (a data
// loader's worker) would keep its parent's peers from seeing that the parent is gone.
#pragma once

namespace sealring {

// Owns a connection from the moment it is a link's, also before the group takes the link. fork() closes it in
// the child. Not a bare system call, for which no handler runs.
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
