// Both directions of a link over shared memory, while the other end writes there whatever it likes.
#include "transport/pipe.hpp"

#include <fcntl.h>

#include "script.hpp"

using namespace sealring;
using namespace sealring::fuzz;

namespace {

constexpr size_t kRing = 4096;
constexpr size_t kFile = kRing + kRingControlBytes;
// Offsets in the control page (shm_pipe.cpp).
constexpr size_t kWords[] = {0, 128, 192, 256};

// Made once: each run gets the same memory, cleared.
struct Memory {
  Memory() {
    for (int end : {0, 1}) {
      files[end] = testing::good(::memfd_create("sealring-fuzz", MFD_CLOEXEC), "memfd_create");
      testing::good(::ftruncate(files[end], kFile), "ftruncate");
      bytes[end] = static_cast<uint8_t*>(
          ::mmap(nullptr, kFile, PROT_READ | PROT_WRITE, MAP_SHARED, files[end], 0));
      if (bytes[end] == MAP_FAILED) throw std::runtime_error("mmap");
    }
  }
  int files[2];
  uint8_t* bytes[2];
};

void run(std::span<const uint8_t> script) {
  static Memory memory;
  std::memset(memory.bytes[0], 0, kFile);
  std::memset(memory.bytes[1], 0, kFile);
  int sockets[2];
  testing::good(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, sockets), "socketpair");
  const auto pipe =
      make_shm_pipe(sockets[0], LinkMemory(memory.files[0], kRing, LinkMemory::Access::write),
                    LinkMemory(memory.files[1], kRing, LinkMemory::Access::read));
  std::vector<uint8_t> private_memory(3 * kRing);
  try {
    for (size_t at = 0; at + 12 <= script.size(); at += 12) {
      const uint8_t* const step = script.data() + at;
      uint64_t value;
      std::memcpy(&value, step + 4, sizeof value);
      const size_t length = value % (2 * kRing + 1);
      iovec part[2] = {{private_memory.data(), length / 2},
                       {private_memory.data() + kRing, length - length / 2}};
      switch (step[0] % 7) {
        case 0:  // the peer writes a control word: a value near the old one, or any value
          if (step[1] & 1) {
            uint64_t now;
            std::memcpy(&now, memory.bytes[1] + kRing + kWords[step[2] % 4], sizeof now);
            value = now + static_cast<int8_t>(step[3]);
          }
          std::memcpy(memory.bytes[1] + kRing + kWords[step[2] % 4], &value, sizeof value);
          break;
        case 1:
          std::memset(memory.bytes[1], step[3], kRing);
          break;
        case 2:
          require(pipe->read(part) <= length);
          break;
        case 3:
          require(pipe->write(part) <= length);
          break;
        case 4:
          (void)pipe->arm(step[1] & 1, step[1] & 2);
          break;
        case 5:
          pipe->disarm();
          break;
        case 6:
          if (step[1] & 1) {
            ::shutdown(sockets[1], SHUT_WR);
          } else {
            (void)!::send(sockets[1], step, 12, MSG_DONTWAIT | MSG_NOSIGNAL);
          }
          break;
      }
    }
  } catch (const PipeEnded&) {
  } catch (const PipeCorrupted&) {
  }
  ::close(sockets[1]);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  run({data, std::min<size_t>(size, 64 * 12)});
  return 0;
}
