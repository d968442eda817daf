#include "transport/link_memory.hpp"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

namespace sealring {

LinkMemory::LinkMemory(int file, size_t ring_bytes, Access access) : ring_bytes_(ring_bytes) {
  const int rights = access == Access::write ? PROT_READ | PROT_WRITE : PROT_READ;
  // Reserves the address space first and then maps both views into it, so that no other mapping can come
  // between them.
  void* space = ::mmap(nullptr, span(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (space == MAP_FAILED) throw std::runtime_error("no address space for a link's memory");
  mapped_ = static_cast<uint8_t*>(space);
  const auto map_at = [&](uint8_t* at, size_t bytes) {
    return ::mmap(at, bytes, rights, MAP_SHARED | MAP_FIXED, file, 0) != MAP_FAILED;
  };
  if (!map_at(mapped_, ring_bytes) ||
      !map_at(mapped_ + ring_bytes, ring_bytes + kRingControlBytes)) {
    const std::string why = std::strerror(errno);
    ::munmap(mapped_, span());
    throw std::runtime_error("cannot map a link's shared memory: " + why);
  }
  // A forked child (a data loader's worker) is no end of the link.
  ::madvise(mapped_, span(), MADV_DONTFORK);
}

LinkMemory::~LinkMemory() {
  if (mapped_ != nullptr) ::munmap(mapped_, span());
}

}  // namespace sealring
