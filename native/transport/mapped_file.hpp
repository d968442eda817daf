// A file of shared memory, mapped to read and to write.
#pragma once

#include <sys/mman.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

namespace sealring {

class MappedFile {
 public:
  MappedFile(int file, size_t bytes) : bytes_(bytes) {
    void* const at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (at == MAP_FAILED) throw std::runtime_error(std::string("mmap: ") + std::strerror(errno));
    at_ = static_cast<uint8_t*>(at);
    // A forked child (a data loader's worker) does not use it.
    ::madvise(at, bytes, MADV_DONTFORK);
  }
  MappedFile(MappedFile&& other) noexcept
      : at_(std::exchange(other.at_, nullptr)), bytes_(other.bytes_) {}
  MappedFile& operator=(MappedFile&&) = delete;
  ~MappedFile() {
    if (at_ != nullptr) ::munmap(at_, bytes_);
  }
  uint8_t* data() const { return at_; }

 private:
  uint8_t* at_ = nullptr;
  size_t bytes_;
};

}  // namespace sealring
