#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "transport/inherited_sockets.hpp"
#include "transport/pipe.hpp"

namespace sealring {
namespace {

class TcpPipe final : public Pipe {
 public:
  explicit TcpPipe(int socket) : socket_(socket) {}

  size_t read(std::span<iovec> into) override {
    msghdr message{};
    message.msg_iov = into.data();
    message.msg_iovlen = into.size();
    return moved(::recvmsg(socket_, &message, MSG_DONTWAIT), true);
  }

  size_t write(std::span<iovec> from) override {
    msghdr message{};
    message.msg_iov = from.data();
    message.msg_iovlen = from.size();
    return moved(::sendmsg(socket_, &message, MSG_DONTWAIT | MSG_NOSIGNAL), false);
  }

  bool arm(bool, bool) override { return true; }
  void disarm() override {}
  short poll_events(bool wants_read, bool wants_write) const override {
    return static_cast<short>((wants_read ? POLLIN : 0) | (wants_write ? POLLOUT : 0));
  }
  int socket() const override { return socket_; }
  void end_writing() override { ::shutdown(socket_, SHUT_WR); }
  // Closing a socket that holds unread bytes resets the connection. What the other side's kernel has not
  // acknowledged by then is lost.
  bool delivered() const override {
    int unacknowledged = 0;
    if (::ioctl(socket_, SIOCOUTQ, &unacknowledged) != 0 || unacknowledged == 0) return true;
    tcp_info info{};
    socklen_t size = sizeof info;
    const bool known = ::getsockopt(socket_, IPPROTO_TCP, TCP_INFO, &info, &size) == 0;
    return known && info.tcpi_state == TCP_CLOSE;  // the other side is gone and will not take it
  }
  size_t memory_bytes() const override { return 0; }

 private:
  static size_t moved(ssize_t result, bool reading) {
    if (result > 0) return static_cast<size_t>(result);
    if (result == 0) {
      if (reading) throw PipeEnded("the peer closed the connection");
      return 0;
    }
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return 0;
    throw PipeEnded(std::strerror(errno), errno);
  }

  LinkSocket socket_;
};

}  // namespace

std::unique_ptr<Pipe> make_tcp_pipe(int socket) { return std::make_unique<TcpPipe>(socket); }

}  // namespace sealring
