// Sockets, shared memory and the two ends of a link, for tests of links and engines.
#pragma once

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "transport/link.hpp"

namespace sealring::testing {

inline constexpr size_t kRing = 64u << 10;

inline int good(int result, const char* what) {
  if (result < 0) throw std::runtime_error(what);
  return result;
}

// A TCP connection over loopback, both ends non-blocking.
inline std::pair<int, int> tcp_pair() {
  const int server = good(::socket(AF_INET, SOCK_STREAM, 0), "socket");
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  good(::bind(server, reinterpret_cast<sockaddr*>(&address), size), "bind");
  good(::listen(server, 1), "listen");
  good(::getsockname(server, reinterpret_cast<sockaddr*>(&address), &size), "getsockname");
  const int near = good(::socket(AF_INET, SOCK_STREAM, 0), "socket");
  good(::connect(near, reinterpret_cast<sockaddr*>(&address), size), "connect");
  const int far = good(::accept(server, nullptr, nullptr), "accept");
  ::close(server);
  for (int end : {near, far}) {
    const int one = 1;
    good(::setsockopt(end, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one), "setsockopt");
    good(::fcntl(end, F_SETFL, O_NONBLOCK), "fcntl");
  }
  return {near, far};
}

// The shared memory of both ends of one link, as the host sees it.
class SharedMemory {
 public:
  SharedMemory() {
    for (size_t end : {0u, 1u}) {
      files[end] = good(::memfd_create("sealring-test", MFD_CLOEXEC), "memfd_create");
      good(::ftruncate(files[end], kBytes), "ftruncate");
      void* mapped = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, files[end], 0);
      if (mapped == MAP_FAILED) throw std::runtime_error("mmap");
      bytes[end] = static_cast<uint8_t*>(mapped);
    }
  }
  ~SharedMemory() {
    for (size_t end : {0u, 1u}) {
      ::munmap(bytes[end], kBytes);
      ::close(files[end]);
    }
  }
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // The memory that the given end writes: its ring, then its control words.
  uint8_t* data(int end) { return bytes[end]; }
  void set_word(int end, size_t offset, uint64_t value) {
    std::memcpy(bytes[end] + kRing + offset, &value, sizeof value);
  }
  bool waits_for_room(int end) {
    const auto* word = reinterpret_cast<std::atomic<uint32_t>*>(bytes[end] + kRing + kWriterSleeps);
    return word->load() % 2 == 1;
  }
  void scribble(uint8_t with) {
    for (uint8_t* each : bytes) std::memset(each, with, kBytes);
  }
  std::unique_ptr<Pipe> pipe(int socket, int end) {
    return make_shm_pipe(socket, LinkMemory(files[end], kRing, LinkMemory::Access::write),
                         LinkMemory(files[1 - end], kRing, LinkMemory::Access::read));
  }

  static constexpr size_t kBytes = kRing + kRingControlBytes;
  static constexpr size_t kWritten = 0;  // offsets in the control page (shm_pipe.cpp)
  static constexpr size_t kTaken = 128;
  static constexpr size_t kWriterSleeps = 256;

 private:
  std::array<int, 2> files{};
  std::array<uint8_t*, 2> bytes{};
};

inline KeyBytes key_of(uint8_t what, int from, int to) {
  KeyBytes key{};
  key[0] = what;
  key[1] = static_cast<uint8_t>(from);
  key[2] = static_cast<uint8_t>(to);
  return key;
}
inline KeyBytes pair_key(int from, int to) { return key_of('p', from, to); }
inline KeyBytes group_key(int rank) { return key_of('g', rank, 0); }

// One rank's side of a link between ranks 0 and 1, with everything that a link needs.
struct End {
  End(int rank, std::unique_ptr<Pipe> pipe, uint64_t rekey_bytes, size_t record_bytes = 4096)
      : keyring{rank, Context{}, std::make_unique<SealingKey>(group_key(rank), rekey_bytes), {}},
        pool(record_bytes),
        link(1 - rank, std::move(pipe), pair_key(rank, 1 - rank), pair_key(1 - rank, rank),
             rekey_bytes, keyring, pool) {
    keyring.groups.resize(2);
    keyring.groups[1 - rank] = std::make_unique<OpeningKey>(group_key(1 - rank));
    link.expecting = true;
  }

  // Seals `text` and queues the record, without writing it to the pipe.
  void enqueue(const std::vector<uint8_t>& text, Kind kind = Kind::pair) {
    Header header;
    header.kind = kind;
    header.length = static_cast<uint32_t>(text.size());
    header.collective = 1;
    BufferRef record = pool.take();
    record->size = kRecordOverhead + text.size();
    if (kind == Kind::group) {
      header.sender = static_cast<uint32_t>(keyring.rank);
      header.receiver = kEveryone;
      seal_record(*keyring.own_group, keyring.context, header, text.data(), record->record);
    } else {
      link.seal(header, text.data(), record->record);
    }
    link.enqueue(std::move(record));
  }

  // Reads until a whole record is here.
  void receive() {
    while (!link.ready()) link.fill();
  }
  std::vector<uint8_t> open() {
    link.open(link.arrived_payload());
    const uint8_t* plain = link.arrived_payload();
    std::vector<uint8_t> text(plain, plain + link.header().length);
    link.take();
    return text;
  }

  Keyring keyring;
  BufferPool pool;
  Link link;
};

struct TwoEnds {
  explicit TwoEnds(SharedMemory* memory = nullptr, uint64_t rekey_bytes = 1u << 30)
      : sockets(tcp_pair()),
        zero(0, pipe(sockets.first, memory, 0), rekey_bytes),
        one(1, pipe(sockets.second, memory, 1), rekey_bytes) {}

  static std::unique_ptr<Pipe> pipe(int socket, SharedMemory* memory, int end) {
    return memory == nullptr ? make_tcp_pipe(socket) : memory->pipe(socket, end);
  }

  std::pair<int, int> sockets;
  End zero;
  End one;
};

}  // namespace sealring::testing
