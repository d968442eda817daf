// Keys in a GPU's memory, for kernels that open sealed files or seal what is parked in host memory. The
// block holds nothing else and is shared with no other process; it is overwritten before it is given back.
#pragma once

#include "device/cuda/driver.hpp"
#include "keys/keys.hpp"

namespace sealring {

class KeyMemory {
 public:
  // A key of 32 bytes, and the base nonce of 12 where there is one.
  static constexpr size_t kEntryBytes = 64;

  KeyMemory(const cuda::Driver& driver, int ordinal, size_t entries);
  ~KeyMemory();
  KeyMemory(const KeyMemory&) = delete;
  KeyMemory& operator=(const KeyMemory&) = delete;

  // Entries lie behind each other, in the order in which they were added.
  void add(const KeyBytes& key, const Nonce& base);
  // Where the GPU finds the first entry.
  cuda::Pointer start() const { return at_; }
  // The keys are not overwritten before this stream has done what it has been given until now. Does not
  // wait for it. A kernel that seals would otherwise seal under a key of zeros.
  void use_until(cuda::Handle stream);
  // Overwrites all of them, and waits for it.
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
