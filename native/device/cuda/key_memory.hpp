// Keys in a GPU's memory, for kernels that open sealed files or seal what is offloaded to host memory. Their
// block holds nothing else and is shared with no other process. It is overwritten before it is freed.
#pragma once

#include "device/cuda/driver.hpp"
#include "keys/keys.hpp"

namespace sealring {

class KeyMemory {
 public:
  // An entry has a key of 32 bytes and, for a file, a base nonce of 12.
  static constexpr size_t kEntryBytes = 64;

  KeyMemory(const cuda::Driver& driver, int ordinal, size_t entries);
  ~KeyMemory();
  KeyMemory(const KeyMemory&) = delete;
  KeyMemory& operator=(const KeyMemory&) = delete;

  // Entries follow each other in memory, in the order in which they were added.
  void add(const KeyBytes& key, const Nonce& base);
  // The GPU address of the first entry.
  cuda::Pointer start() const { return at_; }
  // Delays the overwriting of the keys until the stream has done the work that it has now. Does not wait for
  // it. Without this call a kernel could seal under a key of zeros.
  void use_until(cuda::Handle stream);
  // Overwrites all keys and waits until that is done.
  void wipe() noexcept;

 private:
  const cuda::Driver& cuda_;
  const int ordinal_;
  const size_t entries_;
  size_t used_ = 0;
  cuda::Handle context_ = nullptr;
  cuda::Handle stream_ = nullptr;
  cuda::Pointer at_ = 0;

  void release() noexcept;
};

}  // namespace sealring
