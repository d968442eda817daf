// Reusable memory for records that are sent or received.
//
// A published record may wait in the queues of several links at once, so buffers count their users. Only the
// engine's thread touches them, so the counts are plain integers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "device/device.hpp"
#include "record/record.hpp"

namespace sealring {

class BufferPool;

struct Buffer {
  uint8_t* record = nullptr;  // the header's first byte; the payload starts on a cache line
  size_t size = 0;  // bytes of the record, once known
  int users = 0;
  BufferPool* pool = nullptr;

  uint8_t* payload() const { return record + kSealedHeaderBytes; }
};

class BufferRef {
 public:
  BufferRef() = default;
  explicit BufferRef(Buffer* buffer) : buffer_(buffer) { ++buffer_->users; }
  BufferRef(const BufferRef& other) : buffer_(other.buffer_) {
    if (buffer_ != nullptr) ++buffer_->users;
  }
  BufferRef(BufferRef&& other) noexcept : buffer_(std::exchange(other.buffer_, nullptr)) {}
  BufferRef& operator=(BufferRef other) noexcept {
    std::swap(buffer_, other.buffer_);
    return *this;
  }
  ~BufferRef();

  Buffer* operator->() const { return buffer_; }
  explicit operator bool() const { return buffer_ != nullptr; }

 private:
  Buffer* buffer_ = nullptr;
};

class BufferPool {
 public:
  explicit BufferPool(size_t payload_bytes) : payload_bytes_(payload_bytes) {}
  // Makes further buffers lie in memory that the device can reach. They must be released before the device.
  void take_memory_of(Device* device) { device_ = device; }
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;

  BufferRef take() {
    if (free_.empty()) grow();
    Buffer* buffer = free_.back();
    free_.pop_back();
    buffer->size = 0;
    return BufferRef(buffer);
  }
  // Limits how far the pool grows. With a limit, a caller of take() must have checked room().
  void limit_to(size_t buffers) { limit_ = buffers; }
  // How many buffers can be taken now.
  size_t room() const { return free_.size() + limit_ - all_.size(); }
  // Frees all buffers. None may be in use.
  void clear() {
    free_.clear();
    all_.clear();
    device_ = nullptr;
  }
  void give_back(Buffer* buffer) { free_.push_back(buffer); }
  size_t payload_bytes() const { return payload_bytes_; }
  size_t bytes() const { return all_.size() * slab_bytes(); }
  size_t slab_bytes() const {
    return (kLead + kRecordOverhead + payload_bytes_ + kLine - 1) / kLine * kLine;
  }

 private:
  static constexpr size_t kLine = 64;
  // The payload follows 80 bytes of sealed header; 48 bytes in front put it on a line's start.
  static constexpr size_t kLead = 2 * kLine - kSealedHeaderBytes;
  struct Slab {
    Slab(size_t bytes, Device* device)
        : device(device),
          memory(device != nullptr ? device->take_pinned_memory(bytes)
                                   : static_cast<uint8_t*>(operator new(bytes, kAlign))) {}
    Slab(Slab&& other) noexcept
        : buffer(std::move(other.buffer)),
          device(other.device),
          memory(std::exchange(other.memory, nullptr)) {}
    ~Slab() {
      if (memory == nullptr) return;
      device != nullptr ? device->free_pinned_memory(memory) : operator delete(memory, kAlign);
    }
    static constexpr std::align_val_t kAlign{kLine};
    std::unique_ptr<Buffer> buffer = std::make_unique<Buffer>();
    Device* device;
    uint8_t* memory;
  };
  void grow() {
    all_.emplace_back(slab_bytes(), device_);
    Buffer* buffer = all_.back().buffer.get();
    buffer->record = all_.back().memory + kLead;
    buffer->pool = this;
    free_.push_back(buffer);
  }

  size_t payload_bytes_;
  size_t limit_ = std::numeric_limits<size_t>::max() / 2;
  Device* device_ = nullptr;
  std::vector<Slab> all_;
  std::vector<Buffer*> free_;
};

inline BufferRef::~BufferRef() {
  if (buffer_ != nullptr && --buffer_->users == 0) buffer_->pool->give_back(buffer_);
}

}  // namespace sealring
