#include "keys/secret_memory.hpp"

#include <malloc.h>
#include <openssl/crypto.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

namespace sealring {
namespace {

constexpr size_t kCell = 32;
constexpr size_t kChunk = 16u << 10;

size_t whole_pages(size_t bytes) {
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

struct Mapping {
  uint8_t* memory;
  bool locked;
};

Mapping map_secret(size_t bytes) {
  void* const memory =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  if (::madvise(memory, bytes, MADV_WIPEONFORK) != 0 ||
      ::madvise(memory, bytes, MADV_DONTDUMP) != 0) {
    const int problem = errno;
    ::munmap(memory, bytes);
    throw std::runtime_error(
        std::string("this kernel cannot keep keys from forked children and core "
                    "files (madvise: ") +
        std::strerror(problem) + "): sealring needs Linux 4.14 or later");
  }
  const bool locked = ::mlock(memory, bytes) == 0;
  return {static_cast<uint8_t*>(memory), locked};
}

// Gives out cells of whole chunks. Memory is never unmapped, so all keys stay in the same pages.
class Arena {
 public:
  uint8_t* take(size_t bytes) {
    const size_t size = std::max(kCell, (bytes + kCell - 1) / kCell * kCell);
    const std::lock_guard<std::mutex> lock(mutex);
    auto found = std::find_if(free_.begin(), free_.end(),
                              [size](const auto& piece) { return piece.second >= size; });
    if (found == free_.end()) found = grow(size);
    const auto [memory, room] = *found;
    free_.erase(found);
    if (room > size) free_.emplace(memory + size, room - size);
    return memory;
  }

  void give_back(uint8_t* memory, size_t bytes) {
    size_t size = std::max(kCell, (bytes + kCell - 1) / kCell * kCell);
    OPENSSL_cleanse(memory, size);
    const std::lock_guard<std::mutex> lock(mutex);
    auto next = free_.lower_bound(memory);
    if (next != free_.end() && memory + size == next->first) {
      size += next->second;
      next = free_.erase(next);
    }
    if (next != free_.begin()) {
      const auto before = std::prev(next);
      if (before->first + before->second == memory) {
        before->second += size;
        return;
      }
    }
    free_.emplace(memory, size);
  }

  SecretMemoryReport report() {
    const std::lock_guard<std::mutex> lock(mutex);
    return report_;
  }

  std::mutex mutex;

 private:
  std::map<uint8_t*, size_t>::iterator grow(size_t size) {
    const size_t bytes = whole_pages(std::max(size, kChunk));
    const Mapping made = map_secret(bytes);
    report_.mapped_bytes += bytes;
    if (made.locked) report_.locked_bytes += bytes;
    return free_.emplace(made.memory, bytes).first;
  }

  std::map<uint8_t*, size_t> free_;
  SecretMemoryReport report_{};
};

// Never destroyed: keys may be destroyed after the module's other objects.
Arena& arena() {
  static Arena* const the = new Arena;
  return *the;
}

std::atomic<uint64_t>* mark = nullptr;  // in memory that is zeroed in a child
std::atomic<int> held{0};  // how many NoFork objects exist
std::atomic<int> forking{0};  // threads that are in fork()
thread_local int held_here = 0;
std::mutex overwriting;  // for FreedMemoryOverwritten
int wanting_overwrites = 0;

void before_fork() {
  forking.fetch_add(1);
  // A signal handler may fork in the middle of a seal; it must not wait for its own thread.
  while (held.load() > held_here) ::sched_yield();
  arena().mutex.lock();  // locked last: a thread that uses a key may need memory for another
  overwriting.lock();
}

void after_fork_in_parent() {
  overwriting.unlock();
  arena().mutex.unlock();
  forking.fetch_sub(1);
}

void after_fork_in_child() {
  overwriting.unlock();
  arena().mutex.unlock();
  held.store(held_here);
  forking.store(0);
}

std::atomic<uint64_t>& mark_memory() {
  static std::once_flag once;
  std::call_once(once, [] {
    arena();
    const Mapping made = map_secret(whole_pages(sizeof *mark));
    mark = new (made.memory) std::atomic<uint64_t>(0);
    if (::pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child) != 0) {
      throw std::runtime_error("no handler for fork() can be set");
    }
  });
  return *mark;
}

// This process's random number. A child chooses a new one when it first comes here.
uint64_t this_process() {
  std::atomic<uint64_t>& here = mark_memory();
  uint64_t number = here.load(std::memory_order_relaxed);
  if (number != 0) return number;
  uint64_t fresh = 0;
  while (fresh == 0) {
    if (::getrandom(&fresh, sizeof fresh, 0) != static_cast<ssize_t>(sizeof fresh)) fresh = 0;
  }
  return here.compare_exchange_strong(number, fresh) ? fresh : number;
}

}  // namespace

ProcessMark::ProcessMark() : value_(this_process()) {}

bool ProcessMark::here() const {
  return mark != nullptr && mark->load(std::memory_order_relaxed) == value_;
}

void ProcessMark::require(const char* what) const {
  if (here()) return;
  throw ForkedProcess(
      std::string(what) +
      " belongs to the process that this one was forked from. It goes on there; a "
      "forked child (a data loader's worker, for one) has no part in it. Make the call "
      "in the parent, or give this process a group of its own");
}

NoFork::NoFork() {
  mark_memory();  // sets the handlers for fork()
  for (;;) {
    held.fetch_add(1);
    if (forking.load() == 0 || held_here > 0) break;
    held.fetch_sub(1);
    while (forking.load() != 0) ::sched_yield();
  }
  ++held_here;
}

NoFork::~NoFork() {
  --held_here;
  held.fetch_sub(1);
}

SecretBytes::SecretBytes(size_t size) : data_(arena().take(size)), size_(size) {}

SecretBytes::SecretBytes(const SecretBytes& other)
    : data_(arena().take(other.size_)), size_(other.size_), process_(other.process_) {
  std::copy(other.begin(), other.end(), data_);
}

SecretBytes::SecretBytes(SecretBytes&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      process_(other.process_) {}

SecretBytes& SecretBytes::operator=(const SecretBytes& other) {
  if (this != &other) *this = SecretBytes(other);
  return *this;
}

SecretBytes& SecretBytes::operator=(SecretBytes&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(process_, other.process_);
  return *this;
}

SecretBytes::~SecretBytes() {
  if (data_ != nullptr) arena().give_back(data_, size_);
}

void SecretBytes::wipe() { OPENSSL_cleanse(data_, size_); }

bool SecretBytes::all_zeros() const {
  uint8_t any = 0;
  for (const uint8_t byte : *this) any |= byte;
  return any == 0;
}

bool SecretBytes::operator==(const SecretBytes& other) const {
  return size_ == other.size_ && CRYPTO_memcmp(data_, other.data_, size_) == 0;
}

void SecretBytes::require_key() const {
  process_.require("this key");
  if (all_zeros()) throw std::logic_error("a key of zeros is no key: it was wiped");
}

namespace {

void set_perturbation([[maybe_unused]] int byte) {
#ifdef M_PERTURB
  ::mallopt(M_PERTURB, byte);
#endif
}

}  // namespace

FreedMemoryOverwritten::FreedMemoryOverwritten() {
  const std::lock_guard<std::mutex> lock(overwriting);
  // glibc also fills what it allocates, with the complement of this byte. That must be zero: calloc() in
  // another thread skips its own clearing if this setting changes between the fill and calloc's check.
  if (wanting_overwrites++ == 0) set_perturbation(0xff);
}

FreedMemoryOverwritten::~FreedMemoryOverwritten() {
  const std::lock_guard<std::mutex> lock(overwriting);
  if (--wanting_overwrites != 0) return;
  const char* const before = std::getenv("MALLOC_PERTURB_");  // the user's own setting
  set_perturbation(before == nullptr ? 0 : std::atoi(before));
}

SecretMemoryReport secret_memory_report() { return arena().report(); }

}  // namespace sealring
