// Plaintext that stops its reader in the middle, so that a test can inspect shared memory while a record is
// being sealed. This works in whatever order the AEAD reads and writes.
#pragma once

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <utility>

namespace sealring::testing {

// The first access to the second half runs `halfway`, once; only then the second half can be read.
class InterruptedPlaintext {
 public:
  InterruptedPlaintext(size_t bytes, std::function<void()> halfway)
      : bytes_(bytes), halfway_(std::move(halfway)) {
    if (current_ != nullptr) throw std::logic_error("one at a time");
    const size_t page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
    if (bytes % (2 * page) != 0) throw std::logic_error("both halves must be whole pages");
    void* const memory =
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::runtime_error("mmap");
    data_ = static_cast<uint8_t*>(memory);
    for (size_t i = 0; i < bytes; ++i) data_[i] = static_cast<uint8_t>("PLAINTEXT"[i % 9]);
    if (::mprotect(data_ + bytes / 2, bytes / 2, PROT_NONE) != 0)
      throw std::runtime_error("mprotect");
    current_ = this;
    struct sigaction action{};
    action.sa_sigaction = &on_fault;
    action.sa_flags = SA_SIGINFO;
    ::sigaction(SIGSEGV, &action, &before_);
  }
  ~InterruptedPlaintext() {
    ::sigaction(SIGSEGV, &before_, nullptr);
    current_ = nullptr;
    ::munmap(data_, bytes_);
  }
  InterruptedPlaintext(const InterruptedPlaintext&) = delete;
  InterruptedPlaintext& operator=(const InterruptedPlaintext&) = delete;

  uint8_t* data() const { return data_; }
  size_t size() const { return bytes_; }
  bool was_interrupted() const { return interrupted_; }

 private:
  static void on_fault(int, siginfo_t* what, void*) {
    InterruptedPlaintext* const self = current_;
    const auto* const at = static_cast<const uint8_t*>(what->si_addr);
    const uint8_t* const closed = self->data_ + self->bytes_ / 2;
    if (self->interrupted_ || at < closed || at >= self->data_ + self->bytes_) {
      ::signal(SIGSEGV, SIG_DFL);  // a fault that no test asked for
      return;
    }
    self->interrupted_ = true;
    self->halfway_();
    ::mprotect(self->data_ + self->bytes_ / 2, self->bytes_ / 2, PROT_READ | PROT_WRITE);
  }

  inline static InterruptedPlaintext* current_ = nullptr;
  const size_t bytes_;
  const std::function<void()> halfway_;
  uint8_t* data_ = nullptr;
  volatile bool interrupted_ = false;
  struct sigaction before_{};
};

}  // namespace sealring::testing
