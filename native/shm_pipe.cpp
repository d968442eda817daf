#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>

#include "pipe.hpp"

namespace sealring {
namespace {

// The control page of one ring, writable by both ends and by whoever owns the host. Each end
// keeps its own position in private memory and believes the other's only after checking it.
struct Control {
  alignas(64) std::atomic<uint64_t> written;
  alignas(64) uint8_t nonce[64];  // by which the two ends recognise the memory at set-up
  alignas(64) std::atomic<uint64_t> taken;
  alignas(64) std::atomic<uint32_t> reader_sleeps;
  alignas(64) std::atomic<uint32_t> writer_sleeps;
};
static_assert(sizeof(Control) <= kRingControlBytes);
static_assert(std::atomic<uint64_t>::is_always_lock_free);

class Ring {
 public:
  Ring(uint8_t* memory, size_t bytes)
      : control_(reinterpret_cast<Control*>(memory)), data_(memory + kRingControlBytes),
        bytes_(bytes) {}

  // ---- the writing end
  size_t write(const uint8_t* from, size_t bytes) {
    const size_t n = std::min(bytes, space());
    copy_around(n, [&](size_t at, size_t offset, size_t part) {
      std::memcpy(data_ + at, from + offset, part);
    });
    return n;
  }
  size_t space() {
    const uint64_t taken = control_->taken.load(std::memory_order_seq_cst);
    if (taken > position_ || position_ - taken > bytes_) {
      throw PipeCorrupted("the reader's position in shared memory is impossible");
    }
    return bytes_ - static_cast<size_t>(position_ - taken);
  }
  // Makes what was written visible. True if the reader sleeps and must be woken.
  bool publish() {
    control_->written.store(position_, std::memory_order_seq_cst);
    return control_->reader_sleeps.load(std::memory_order_seq_cst) != 0 &&
           control_->reader_sleeps.exchange(0) != 0;
  }
  void writer_sleeps(bool yes) { control_->writer_sleeps.store(yes ? 1 : 0); }

  // ---- the reading end
  size_t read(uint8_t* into, size_t bytes) {
    const size_t n = std::min(bytes, available());
    copy_around(n, [&](size_t at, size_t offset, size_t part) {
      std::memcpy(into + offset, data_ + at, part);
    });
    return n;
  }
  size_t available() {
    const uint64_t written = control_->written.load(std::memory_order_seq_cst);
    if (written < position_ || written - position_ > bytes_) {
      throw PipeCorrupted("the writer's position in shared memory is impossible");
    }
    return static_cast<size_t>(written - position_);
  }
  // Gives the space back. True if the writer sleeps and must be woken.
  bool release() {
    control_->taken.store(position_, std::memory_order_seq_cst);
    return control_->writer_sleeps.load(std::memory_order_seq_cst) != 0 &&
           control_->writer_sleeps.exchange(0) != 0;
  }
  void reader_sleeps(bool yes) { control_->reader_sleeps.store(yes ? 1 : 0); }

 private:
  template <typename Copy>
  void copy_around(size_t n, Copy copy) {
    const size_t at = static_cast<size_t>(position_ % bytes_);
    const size_t first = std::min(n, bytes_ - at);
    if (first != 0) copy(at, 0, first);
    if (n > first) copy(0, first, n - first);
    position_ += n;
  }

  Control* control_;
  uint8_t* data_;
  size_t bytes_;
  uint64_t position_ = 0;  // of this end; the shared copy is only ever written
};

class ShmPipe final : public Pipe {
 public:
  ShmPipe(int socket, uint8_t* memory, size_t ring_bytes, bool first)
      : socket_(socket), memory_(memory), mapped_(2 * (kRingControlBytes + ring_bytes)),
        out_(memory + (first ? 0 : kRingControlBytes + ring_bytes), ring_bytes),
        in_(memory + (first ? kRingControlBytes + ring_bytes : 0), ring_bytes) {}
  ~ShmPipe() override {
    ::munmap(memory_, mapped_);
    ::close(socket_);
  }

  size_t read(std::span<iovec> into) override {
    size_t total = 0;
    for (const iovec& part : into) {
      const size_t n = in_.read(static_cast<uint8_t*>(part.iov_base), part.iov_len);
      total += n;
      if (n < part.iov_len) break;
    }
    if (total != 0) {
      if (in_.release()) ring_bell();
    } else if (ended_ && in_.available() == 0) {
      // What the peer wrote before it went is read first: it may say why it went.
      throw PipeEnded("the peer's process closed the link");
    }
    return total;
  }

  size_t write(std::span<iovec> from) override {
    size_t total = 0;
    for (const iovec& part : from) {
      const size_t n = out_.write(static_cast<const uint8_t*>(part.iov_base), part.iov_len);
      total += n;
      if (n < part.iov_len) break;
    }
    if (total != 0) {
      if (out_.publish()) ring_bell();
    } else if (ended_) {
      throw PipeEnded("the peer's process closed the link");  // nobody will make room any more
    }
    return total;
  }

  bool arm(bool wants_read, bool wants_write) override {
    if (wants_read) in_.reader_sleeps(true);
    if (wants_write) out_.writer_sleeps(true);
    return !((wants_read && in_.available() != 0) || (wants_write && out_.space() != 0) || ended_);
  }

  void disarm() override {
    in_.reader_sleeps(false);
    out_.writer_sleeps(false);
    hear_bell();
  }

  // The socket carries nothing but wake-ups, whichever way the bytes go.
  short poll_events(bool, bool) const override { return ended_ ? 0 : POLLIN; }
  int socket() const override { return socket_; }
  void end_writing() override { ::shutdown(socket_, SHUT_WR); }
  bool delivered() const override { return true; }
  size_t memory_bytes() const override { return mapped_; }

 private:
  // A full socket means that the bell has been rung more than enough.
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

  int socket_;
  uint8_t* memory_;
  size_t mapped_;
  Ring out_;
  Ring in_;
  bool ended_ = false;
};

}  // namespace

std::unique_ptr<Pipe> make_shm_pipe(int socket, int memory, size_t ring_bytes, bool first) {
  const size_t bytes = 2 * (kRingControlBytes + ring_bytes);
  void* mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
  if (mapped == MAP_FAILED) {
    const std::string why = std::strerror(errno);
    ::close(socket);
    throw std::runtime_error("cannot map the link's shared memory: " + why);
  }
  return std::make_unique<ShmPipe>(socket, static_cast<uint8_t*>(mapped), ring_bytes, first);
}

}  // namespace sealring
