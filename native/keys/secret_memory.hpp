// Memory for keys, and the mark by which a process knows what is its own.
//
// All keys of this process lie in anonymous mappings that a forked child finds filled with zeros
// (MADV_WIPEONFORK), that core files leave out (MADV_DONTDUMP), that are locked into RAM as far as
// RLIMIT_MEMLOCK allows, and that are overwritten before they are used again.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>

namespace sealring {

// A process uses what belongs to the process that it was forked from.
struct ForkedProcess : std::runtime_error {
  explicit ForkedProcess(const std::string& what) : std::runtime_error(what) {}
};

// The process in which an object was made. The number that it compares with lies in memory that the
// kernel fills with zeros in every child, however the child was made: a pid could come again, and
// fork handlers do not run for a bare system call.
class ProcessMark {
 public:
  ProcessMark();
  bool here() const;
  // Throws ForkedProcess if this is another process.
  void require(const char* what) const;

 private:
  uint64_t value_;
};

// While one exists, a key may be in memory of OpenSSL's, or a lock of OpenSSL's may be taken. A child
// would inherit the key, and the lock would never be free there. So fork() waits until there is none.
// Who has one must not wait for the GIL: the thread that forks may hold it.
class NoFork {
 public:
  NoFork();
  ~NoFork();
  NoFork(const NoFork&) = delete;
  NoFork& operator=(const NoFork&) = delete;
};

// Bytes in the memory for keys. Each copy is overwritten when it goes.
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
  // In constant time.
  bool operator==(const SecretBytes& other) const;

  // Whether the process that made these bytes is this one. A child's copy holds zeros.
  const ProcessMark& process() const { return process_; }
  // Throws unless these bytes can be a key here: not in a forked child, not if all are zero.
  void require_key() const;

 private:
  uint8_t* data_;
  size_t size_;
  ProcessMark process_;
};

// While one exists, the C library overwrites the larger blocks that are freed, in all threads. For
// libraries that free secrets as they are: OpenSSL's TLS connections hold theirs in a block of several
// KiB. Other libraries' allocators than glibc's take no notice.
class FreedMemoryOverwritten {
 public:
  FreedMemoryOverwritten();
  ~FreedMemoryOverwritten();
  FreedMemoryOverwritten(const FreedMemoryOverwritten&) = delete;
  FreedMemoryOverwritten& operator=(const FreedMemoryOverwritten&) = delete;
};

struct SecretMemoryReport {
  size_t mapped_bytes;
  size_t locked_bytes;  // less than mapped_bytes where RLIMIT_MEMLOCK did not allow more
};
SecretMemoryReport secret_memory_report();

}  // namespace sealring
