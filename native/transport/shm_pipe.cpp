#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>

#include "transport/inherited_sockets.hpp"
#include "transport/pipe.hpp"

namespace sealring {
namespace {

// The control words that one end writes for the other. Each end keeps its own positions in private memory and
// never reads them back from here. It checks the other end's positions before it uses them, because others
// may write here as well.
struct Control {
  alignas(128) std::atomic<uint64_t> written;  // bytes put into this end's ring
  alignas(128) std::atomic<uint64_t> taken;    // bytes taken out of the other end's ring
  // Odd while this end sleeps until there is something to read (reader_sleeps) or room to write
  // (writer_sleeps). Every sleep has its own number, so that a peer, which cannot reset the word, wakes this
  // end only once for each sleep.
  alignas(64) std::atomic<uint32_t> reader_sleeps;
  alignas(64) std::atomic<uint32_t> writer_sleeps;
};
static_assert(sizeof(Control) <= kRingControlBytes);
static_assert(std::atomic<uint64_t>::is_always_lock_free);

Control* control_of(const LinkMemory& memory) {
  return reinterpret_cast<Control*>(memory.control());
}

// Announces this end's sleeps.
class SleepSign {
 public:
  explicit SleepSign(std::atomic<uint32_t>& shared) : shared_(shared) {}
  void set(bool asleep) {
    if (asleep == (number_ % 2 == 1)) return;
    shared_.store(++number_, std::memory_order_seq_cst);
  }

 private:
  std::atomic<uint32_t>& shared_;
  uint32_t number_ = 0;
};

// Watches the other end's sleeps.
class SleepWatch {
 public:
  explicit SleepWatch(const std::atomic<uint32_t>& shared) : shared_(shared) {}
  // Whether the peer sleeps and has not been woken from that sleep. Only a hint: a peer that lies here causes
  // needless wake-ups or sleeps longer, nothing worse.
  bool must_wake() {
    const uint32_t number = shared_.load(std::memory_order_seq_cst);
    if (number % 2 == 0 || number == woken_) return false;
    woken_ = number;
    return true;
  }

 private:
  const std::atomic<uint32_t>& shared_;
  uint32_t woken_ = 0;
};

// The ring that this end writes and the other end reads.
class OutRing {
 public:
  OutRing(const LinkMemory& own, const LinkMemory& peer)
      : data_(own.data()),
        bytes_(own.ring_bytes()),
        written_(control_of(own)->written),
        taken_(control_of(peer)->taken) {}

  size_t space() const {
    const uint64_t taken = taken_.load(std::memory_order_seq_cst);
    if (taken > position_ || position_ - taken > bytes_) {
      throw PipeCorrupted("the reader's position in shared memory is impossible");
    }
    return bytes_ - static_cast<size_t>(position_ - taken);
  }
  // The address for the next bytes. The ring is mapped twice in a row, so they never have to wrap around.
  uint8_t* next() const { return data_ + position_ % bytes_; }
  void advance(size_t bytes) { position_ += bytes; }
  void publish() { written_.store(position_, std::memory_order_seq_cst); }

 private:
  uint8_t* data_;
  size_t bytes_;
  std::atomic<uint64_t>& written_;
  const std::atomic<uint64_t>& taken_;
  uint64_t position_ = 0;
};

// The ring that the other end writes and this end reads.
class InRing {
 public:
  InRing(const LinkMemory& own, const LinkMemory& peer)
      : data_(peer.data()),
        bytes_(peer.ring_bytes()),
        written_(control_of(peer)->written),
        taken_(control_of(own)->taken) {}

  size_t available() const {
    const uint64_t written = written_.load(std::memory_order_seq_cst);
    if (written < position_ || written - position_ > bytes_) {
      throw PipeCorrupted("the writer's position in shared memory is impossible");
    }
    return static_cast<size_t>(written - position_);
  }
  size_t read(uint8_t* into, size_t bytes) {
    const size_t n = std::min(bytes, available());
    if (n != 0) std::memcpy(into, data_ + position_ % bytes_, n);
    position_ += n;
    return n;
  }
  // Tells the writer that the space is free again.
  void release() { taken_.store(position_, std::memory_order_seq_cst); }

 private:
  const uint8_t* data_;
  size_t bytes_;
  const std::atomic<uint64_t>& written_;
  std::atomic<uint64_t>& taken_;
  uint64_t position_ = 0;
};

class ShmPipe final : public Pipe {
 public:
  ShmPipe(int socket, LinkMemory own, LinkMemory peer)
      : socket_(socket),
        own_(std::move(own)),
        peer_(std::move(peer)),
        out_(own_, peer_),
        in_(own_, peer_),
        reader_sleeps_(control_of(own_)->reader_sleeps),
        writer_sleeps_(control_of(own_)->writer_sleeps),
        peer_reads_(control_of(peer_)->reader_sleeps),
        peer_writes_(control_of(peer_)->writer_sleeps) {}

  size_t read(std::span<iovec> into) override {
    size_t total = 0;
    for (const iovec& part : into) {
      const size_t n = in_.read(static_cast<uint8_t*>(part.iov_base), part.iov_len);
      total += n;
      if (n < part.iov_len) break;
    }
    if (total != 0) {
      in_.release();
      if (peer_writes_.must_wake()) ring_bell();
    } else if (ended_ && in_.available() == 0) {
      // What the peer wrote before it left is read first: it may say why it left.
      throw PipeEnded("the peer's process closed the link");
    }
    return total;
  }

  size_t write(std::span<iovec> from) override {
    size_t total = 0;
    for (const iovec& part : from) {
      const size_t n = std::min(part.iov_len, out_.space());
      if (n != 0) std::memcpy(out_.next(), part.iov_base, n);
      out_.advance(n);
      total += n;
      if (n < part.iov_len) break;
    }
    if (total != 0) {
      out_.publish();
      if (peer_reads_.must_wake()) ring_bell();
    } else if (ended_) {
      throw PipeEnded("the peer's process closed the link");  // no reader will make room
    }
    return total;
  }

  bool arm(bool wants_read, bool wants_write) override {
    if (wants_read) reader_sleeps_.set(true);
    if (wants_write) writer_sleeps_.set(true);
    return !((wants_read && in_.available() != 0) || (wants_write && out_.space() != 0) || ended_);
  }

  void disarm() override {
    reader_sleeps_.set(false);
    writer_sleeps_.set(false);
    hear_bell();
  }

  // The socket carries nothing but wake-ups, whichever way the bytes go.
  short poll_events(bool, bool) const override { return ended_ ? 0 : POLLIN; }
  int socket() const override { return socket_; }
  void end_writing() override { ::shutdown(socket_, SHUT_WR); }
  bool delivered() const override { return true; }
  // The peer counts its own memory.
  size_t memory_bytes() const override { return own_.ring_bytes() + kRingControlBytes; }

 private:
  // A send that fails because the socket is full does not matter: enough wake-ups are on their way.
  void ring_bell() {
    const char one = 1;
    (void)!::send(socket_, &one, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
  }
  void hear_bell() {
    char rung[256];
    const ssize_t n = ::recv(socket_, rung, sizeof rung, MSG_DONTWAIT);
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) {
      ended_ = true;
    }
  }

  LinkSocket socket_;
  LinkMemory own_;
  LinkMemory peer_;
  OutRing out_;
  InRing in_;
  SleepSign reader_sleeps_;
  SleepSign writer_sleeps_;
  SleepWatch peer_reads_;
  SleepWatch peer_writes_;
  bool ended_ = false;
};

}  // namespace

std::unique_ptr<Pipe> make_shm_pipe(int socket, LinkMemory own, LinkMemory peer) {
  if (!own.mapped() || !peer.mapped() || own.ring_bytes() != peer.ring_bytes()) {
    ::close(socket);
    throw std::invalid_argument("a link needs two memories of one size that serve no other link");
  }
  return std::make_unique<ShmPipe>(socket, std::move(own), std::move(peer));
}

}  // namespace sealring
