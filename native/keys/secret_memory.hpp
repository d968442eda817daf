// Memory for keys, and a mark by which a process recognises its own objects.
//
// All keys of this process are in anonymous mappings. A forked child finds these filled with zeros
// (MADV_WIPEONFORK), and core files leave them out (MADV_DONTDUMP). They are locked into RAM as far as
// RLIMIT_MEMLOCK allows, and overwritten before they are used again.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>

namespace sealring {

// Thrown when a forked child uses an object of its parent.
struct ForkedProcess : std::runtime_error {
  explicit ForkedProcess(const std::string& what) : std::runtime_error(what) {}
};

// The process in which an object was made. The number that it compares is in memory that the kernel fills
// with zeros in every child, however the child was made. A pid could be reused, and fork handlers do not run
// for a bare system call.
class ProcessMark {
 public:
  ProcessMark();
  bool here() const;
  // Throws ForkedProcess if this is another process.
  void require(const char* what) const;

 private:
  uint64_t value_;
};

// While a NoFork exists, a key may be in OpenSSL's memory, or a lock of OpenSSL may be taken. A child would
// inherit the key, and the lock would stay locked there for ever. So fork() waits until no NoFork exists. A
// thread that holds one must not wait for the GIL, which the thread that forks may hold.
class NoFork {
 public:
  NoFork();
  ~NoFork();
  NoFork(const NoFork&) = delete;
  NoFork& operator=(const NoFork&) = delete;
};

// Bytes in the memory for keys. Each copy is overwritten when it is destroyed.
class SecretBytes {
 public:
  explicit SecretBytes(size_t size);
  SecretBytes(const SecretBytes& other);
  SecretBytes(SecretBytes&& other) noexcept;
  SecretBytes& operator=(const SecretBytes& other);
  SecretBytes& operator=(SecretBytes&& other) noexcept;
  ~SecretBytes();

  uint8_t* data() { return data_; }
  const uint8_t* data() const { return data_; }
  size_t size() const { return size_; }
  uint8_t* begin() { return data_; }
  uint8_t* end() { return data_ + size_; }
  const uint8_t* begin() const { return data_; }
  const uint8_t* end() const { return data_ + size_; }
  uint8_t& operator[](size_t at) { return data_[at]; }
  uint8_t operator[](size_t at) const { return data_[at]; }
  void fill(uint8_t value) { std::fill(begin(), end(), value); }
  void wipe();
  bool all_zeros() const;
  // Compares in constant time.
  bool operator==(const SecretBytes& other) const;

  // The process that made these bytes. A child's copy holds zeros.
  const ProcessMark& process() const { return process_; }
  // Throws in a forked child, or if all bytes are zero: they can then be no key.
  void require_key() const;

 private:
  uint8_t* data_;
  size_t size_;
  ProcessMark process_;
};

// While one exists, the C library overwrites the larger blocks that are freed, in all threads. It is for
// libraries that do not overwrite the secrets they free: OpenSSL's TLS connections hold theirs in a block of
// several KiB. Only glibc's allocator does this.
class FreedMemoryOverwritten {
 public:
  FreedMemoryOverwritten();
  ~FreedMemoryOverwritten();
  FreedMemoryOverwritten(const FreedMemoryOverwritten&) = delete;
  FreedMemoryOverwritten& operator=(const FreedMemoryOverwritten&) = delete;
};

struct SecretMemoryReport {
  size_t mapped_bytes;
  size_t locked_bytes;  // less than mapped_bytes if RLIMIT_MEMLOCK did not allow more
};
SecretMemoryReport secret_memory_report();

}  // namespace sealring
