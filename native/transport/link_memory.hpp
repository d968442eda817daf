// One end's part of a link's shared memory: a ring of bytes, and a page of control words.
//
//     file     | ring | control |              written by its owner alone
//     mapped   | ring | ring again | control | so that data which wraps around is still in one piece
//
// The owner maps the memory writable before links/memory.py seals its file against further writers. The other
// end maps it read-only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace sealring {

inline constexpr size_t kRingControlBytes = 4096;

class LinkMemory {
 public:
  enum class Access { read, write };

  // The caller keeps the file. ring_bytes must be a multiple of the system's page size.
  LinkMemory(int file, size_t ring_bytes, Access access);
  LinkMemory(LinkMemory&& other) noexcept
      : mapped_(std::exchange(other.mapped_, nullptr)), ring_bytes_(other.ring_bytes_) {}
  LinkMemory& operator=(LinkMemory&&) = delete;
  ~LinkMemory();

  uint8_t* data() const { return mapped_; }
  uint8_t* control() const { return mapped_ + 2 * ring_bytes_; }
  size_t ring_bytes() const { return ring_bytes_; }
  bool mapped() const { return mapped_ != nullptr; }

 private:
  size_t span() const { return 2 * ring_bytes_ + kRingControlBytes; }

  uint8_t* mapped_ = nullptr;
  size_t ring_bytes_;
};

}  // namespace sealring
